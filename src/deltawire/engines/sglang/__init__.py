"""SGLang as an engine. In the server runs `loader`; in the agent next to it run `adapter` and `ranks`."""
