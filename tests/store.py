"""The store by which ranks find each other, as torchrun's agent holds it: prints its port, and waits to be killed."""

import signal

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()
