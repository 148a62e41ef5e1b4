"""A whole RL run on one machine, to try deltawire out: what `deltawire demo` and `deltawire hello` start."""
