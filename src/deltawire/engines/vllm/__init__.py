"""vLLM as an engine. In the server run `plugin`, `worker` and `cpu`; in the agent next to it runs `adapter`."""
