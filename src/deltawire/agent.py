"""The agent that keeps an engine current, under the name that programs import."""

from deltawire.engines.agent import Agent as Agent
from deltawire.engines.agent import Health as Health
