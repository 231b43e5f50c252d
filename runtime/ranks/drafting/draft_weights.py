"""The weights of a rank's draft model, which come and go with those of its target."""

import torch

from runtime.messages.ranks import StartRank
from runtime.models.base import Model
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.drafting.open_drafts import DraftLoader, LoadedDraft
from runtime.ranks.weight_offload import OffloadedModel


class DraftWeights:
    """Releases the weights of a draft model and resumes them: read again, or copied back from host memory
    (--enable-draft-weights-cpu-backup)."""

    def __init__(self, drafts: DraftRunner, loader: DraftLoader, num_bytes: int, *, has_backup: bool) -> None:
        """`num_bytes`: of the weights on the device."""
        self.drafts = drafts
        self.loader = loader
        self.num_bytes = num_bytes
        self.has_backup = has_backup
        self.attentions = list(drafts.network.attentions)  # sizes of its layers' caches; they have no weights
        self._offloaded: OffloadedModel | None = None

    def release(self) -> None:
        """Drops the draft model, or with a backup moves its weights to host memory."""
        if not self.has_backup:
            self.drafts.network = None
        elif self._offloaded is None:
            self.drafts.network.forget()
            self._offloaded = OffloadedModel(self.drafts.network.parts)

    def resume(self, target: Model, torch_device: torch.device) -> None:
        """Loads the draft model of `target`, or copies its weights back. Raises if there is no memory."""
        if self._offloaded is None:
            self.drafts.network = self.loader.load(target).network
            return
        self._offloaded.restore(torch_device)
        self._offloaded = None
        self.drafts.network.attach(target)

    def replace(self, start: StartRank) -> None:
        """Drops the draft model; the one that goes with another checkpoint of its target comes when it is
        resumed. Raises ModelError."""
        self.drafts.network, self._offloaded = None, None
        self.loader = self.loader.of_target(start)


def open_draft_weights(
    drafts: DraftRunner | None, loader: DraftLoader | None, loaded: LoadedDraft | None, start: StartRank
) -> DraftWeights | None:
    """None: these ranks have no draft model."""
    if drafts is None or loader is None or loaded is None:
        return None
    return DraftWeights(drafts, loader, loaded.num_bytes, has_backup=start.offload_setup.has_draft_backup)
