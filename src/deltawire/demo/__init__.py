"""A whole run on one machine, for trying out: what `deltawire demo` starts."""
