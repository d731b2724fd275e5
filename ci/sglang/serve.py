"""Runs `python -m sglang.launch_server` on a CPU. A prefill server's sender must not put page numbers into pinned memory, which needs CUDA.

SGLang's processes import this file, too. SGLang's own files stay as they are installed.
"""

import runpy
import sys

if "--disaggregation-mode" in sys.argv:
    from sglang.srt.disaggregation.mooncake import conn

    for sender in vars(conn).values():
        if isinstance(sender, type) and getattr(sender, "supports_host_tensor_indices", False):
            sender.supports_host_tensor_indices = False

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
