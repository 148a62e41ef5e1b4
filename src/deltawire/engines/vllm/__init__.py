"""vLLM as an engine. In the server run `plugin`, `worker` and `cpu`; in the agent beside it runs `client`."""
