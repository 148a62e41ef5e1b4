"""Wordle as an OpenEnv environment.

`game` has the rules, `sessions` the games of a server, `server` the OpenEnv server and its endpoint for many games at
once, `client` plays many games through it, `env` one game through OpenEnv's own client. `python -m
deltawire_demo.wordle` starts the server.
"""
