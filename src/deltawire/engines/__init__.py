"""Where weights go: engines that serve them, and the mirror beside each.

engine      what an engine must be able to do
target      a mirror and an engine, as a replica's target
layout      where the elements of a checkpoint live in an engine's memory
trace       finds that out from a model's own loading code
live        the weights of one process: changed in place, checked
staged      changes on their way into such a process
memory      reads and writes elements in host memory; device_memory on a GPU
torch       a module in this process
vllm        a vLLM server
sglang      an SGLang server
"""
