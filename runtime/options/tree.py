"""Options: all groups under one root."""

from msgspec import field

from runtime.options.declare import Group
from runtime.options.groups.ascend import Ascend
from runtime.options.groups.debug import Debug
from runtime.options.groups.disaggregation import Disaggregation
from runtime.options.groups.experts import Experts
from runtime.options.groups.graphs import Graphs
from runtime.options.groups.http import Api, Http
from runtime.options.groups.kernels import Kernels
from runtime.options.groups.logs import Logs
from runtime.options.groups.lora import Lora
from runtime.options.groups.memory import Memory
from runtime.options.groups.model import Model
from runtime.options.groups.multimodal import Multimodal
from runtime.options.groups.null import Null
from runtime.options.groups.observe import Observe
from runtime.options.groups.parallel import Parallel
from runtime.options.groups.precision import Precision
from runtime.options.groups.schedule import Schedule
from runtime.options.groups.speculation import Speculation
from runtime.options.groups.states import States
from runtime.options.groups.tiers import Tiers
from runtime.options.groups.weights import Weights


class Options(Group, frozen=True, kw_only=True):
    """The given options, or their defaults, with "auto" where the runtime chooses. Names are unique over all
    groups."""

    model: Model = field(default_factory=Model)
    weights: Weights = field(default_factory=Weights)
    http: Http = field(default_factory=Http)
    api: Api = field(default_factory=Api)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = field(default_factory=Parallel)
    logs: Logs = field(default_factory=Logs)
    observe: Observe = field(default_factory=Observe)
    lora: Lora = field(default_factory=Lora)
    kernels: Kernels = field(default_factory=Kernels)
    graphs: Graphs = field(default_factory=Graphs)
    speculation: Speculation = field(default_factory=Speculation)
    experts: Experts = field(default_factory=Experts)
    states: States = field(default_factory=States)
    tiers: Tiers = field(default_factory=Tiers)
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    multimodal: Multimodal = field(default_factory=Multimodal)
    ascend: Ascend = field(default_factory=Ascend)
    debug: Debug = field(default_factory=Debug)
    null: Null = field(default_factory=Null)
