"""SGLang as an engine. In the server runs `loader`; in the agent beside it run `client` and `ranks`."""
