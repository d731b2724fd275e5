"""A stand-in for SGLang's compiled kernels. SGLang imports their names, and on a CPU without AMX runs a Llama model with plain torch.

A kernel that is called all the same fails with its name.
"""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} was called")

    return missing
