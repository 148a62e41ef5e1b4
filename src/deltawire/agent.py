"""The agent that keeps an engine current: the names to import."""

from deltawire.engines.agent import Agent as Agent
from deltawire.engines.agent import Health as Health
