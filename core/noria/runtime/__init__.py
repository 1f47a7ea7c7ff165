"""Running a model: the memory plan, the scheduler, the session, and what they report."""

from noria.runtime.config import AUTO, EngineConfig, LoadMode
from noria.runtime.counters import Counters
from noria.runtime.plan import MemoryPlan
from noria.runtime.session import Session, plan_memory
from noria.runtime.timeline import Timeline

__all__ = ["AUTO", "Counters", "EngineConfig", "LoadMode", "MemoryPlan", "Session", "Timeline", "plan_memory"]
