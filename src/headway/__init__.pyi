from headway.api.llm import LLM as LLM
from headway.api.llm import Completion as Completion
from headway.api.simulation import SimulationResult as SimulationResult
from headway.api.simulation import load_scenario as load_scenario
from headway.api.simulation import simulate as simulate
from headway.api.sizing import ChunkSize as ChunkSize
from headway.api.sizing import chunk_size as chunk_size
from headway.api.sizing import fitted_latency as fitted_latency
from headway.api.sizing import measured_latency as measured_latency
from headway.core.batch import RequestProgress as RequestProgress
from headway.core.request import Request as Request
from headway.core.request import SamplingParams as SamplingParams
from headway.core.request import Slo as Slo
from headway.core.request import Span as Span
from headway.kv.block_manager import BlockManager as BlockManager
from headway.perf.latency.base import BatchLoad as BatchLoad
from headway.policy.iteration.config import SchedulerConfig as SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler as Scheduler
from headway.sim.scenario import Scenario as Scenario

__version__: str
