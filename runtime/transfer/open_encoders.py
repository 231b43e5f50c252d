"""A server's part in encoder disaggregation, put together from the options."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import numpy as np
from anyio.abc import TaskGroup
from msgspec import to_builtins

from runtime import log
from runtime.errors import ModelError, Unavailable
from runtime.messages.media import EncodeRows, MediaValues
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.storage.identity import identity, weight_samples
from runtime.transfer.encoder_service import EncoderService
from runtime.transfer.encoders import Encoders, parse_address
from runtime.transfer.key import SERVERS_KEY, link_key

RECOVERY_S = 60.0  # for which an input waits for ranks that are started again
AGAIN_S = 0.05  # between two tries

EncodeOnRanks = Callable[[EncodeRows], Awaitable[np.ndarray]]


class EncoderServer:
    """What a server with --encoder-only listens on."""

    def __init__(self, plan: Plan, model: ModelConfig, encode: EncodeOnRanks) -> None:
        """`encode`: on the ranks; raises Unavailable while they take no commands. Raises StartError."""
        self.port = 0  # from `start` on
        self._address = plan.http.host, plan.disaggregation.disaggregation_bootstrap_port
        self._encode = encode
        key = link_key(SERVERS_KEY.read(plan.disaggregation.disaggregation_key_file))
        self.service = EncoderService(key, encoder_identity(plan, model), self._encoded)

    async def start(self, tasks: TaskGroup) -> None:
        """Listens. Raises StartError."""
        self.port = await tasks.start(self.service.run, *self._address)
        log.get("encoders").info("inputs are encoded for other servers", port=self.port)

    async def _encoded(self, media: MediaValues) -> np.ndarray:
        """The rows of a file. Waits for ranks that are started again, or whose ring is full."""
        with anyio.move_on_after(RECOVERY_S):
            while True:
                try:
                    return await self._encode(EncodeRows(id=0, media=media))
                except Unavailable:
                    await anyio.sleep(AGAIN_S)
        raise Unavailable(f"the ranks took nothing for {RECOVERY_S:g} s")


def open_encoders(plan: Plan, model: ModelConfig) -> Encoders | None:
    """The encoder servers that --encoder-urls names; None without --language-only. Raises StartError."""
    if not plan.disaggregation.language_only:
        return None
    addresses = [parse_address(url) for url in plan.disaggregation.encoder_urls]
    key = link_key(SERVERS_KEY.read(plan.disaggregation.disaggregation_key_file))
    return Encoders(addresses, key, encoder_identity(plan, model), _media(model).output_size)


def check_encoders(plan: Plan, model: ModelConfig) -> None:
    """Raises StartError for a model without an encoder here, a missing key, and addresses that are none."""
    own = plan.disaggregation
    if own.encoder_only or own.language_only:
        _media(model)
        SERVERS_KEY.read(own.disaggregation_key_file)
        for url in own.encoder_urls:
            parse_address(url)


def encoder_identity(plan: Plan, model: ModelConfig) -> bytes:
    """Whose rows these are. Raises ModelError for a model without an encoder here."""
    return identity(
        encoder=to_builtins(_media(model)),
        weights=["dummy", plan.schedule.random_seed]
        if plan.model.load_format == "dummy"
        else weight_samples(Path(plan.model.model_path)),
        dtype=plan.precision.dtype,
    )


def _media(model: ModelConfig) -> MediaConfig:
    if model.media is None:
        raise ModelError(
            "--encoder-only and --language-only are for models whose images or sounds this runtime encodes "
            "(docs/multimodal_models.md); leave them out"
        )
    return model.media
