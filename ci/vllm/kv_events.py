"""vLLM's KV events over ZMQ: the replay of all batches, and the blocks that an engine has in its prefix cache after them."""

import struct
from dataclasses import dataclass

import msgpack
import zmq

END = b"\xff" * 8
TIMEOUT_MS = 10_000


@dataclass(frozen=True)
class Block:
    """A block in an engine's cache. Engine hashes are opaque: a block is identified by its tokens and its chain of parents."""

    parent: int | None
    token_ids: tuple
    extra_keys: tuple


def replay(endpoint, start=0):
    """Returns (sequence number, events) of each batch that the engine still has, from `start` on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", struct.pack(">Q", start)])
        batches = []
        while dealer.poll(TIMEOUT_MS):
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == END:
                return batches
            batches.append((struct.unpack(">Q", sequence)[0], msgpack.unpackb(payload)[1]))
    raise TimeoutError(f"no end of the replay from {endpoint} within {TIMEOUT_MS / 1000:.0f} s")


def cache(batches):
    """Returns the blocks in the engine's device cache after these batches, by engine hash. The batches must start with the first one."""
    blocks = {}
    for expected, (sequence, events) in enumerate(batches):
        assert sequence == expected, f"batch {expected} is missing: the engine's buffer no longer has it"
        for event in events:
            if event["type"] == "AllBlocksCleared":
                blocks.clear()
            elif event["medium"] == "GPU" and event["type"] == "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                for index, block_hash in enumerate(event["block_hashes"]):
                    keys = tuple((event.get("extra_keys") or [None] * len(event["block_hashes"]))[index] or ())
                    blocks[block_hash] = Block(parent, tuple(event["token_ids"][index * size : (index + 1) * size]), keys)
                    parent = block_hash
            elif event["medium"] == "GPU" and event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    blocks.pop(block_hash, None)
    return blocks


def chains(blocks):
    """Returns, for each cached block whose ancestors are cached, all tokens of the chain up to it and the keys of its first block."""
    found = set()
    for block in blocks.values():
        tokens, keys = [], ()
        while block is not None:
            tokens.append(block.token_ids)
            keys, parent = block.extra_keys, block.parent
            block = blocks.get(parent) if parent is not None else None
            if block is None and parent is not None:
                break
        else:
            found.add((tuple(token for part in reversed(tokens) for token in part), keys))
    return found
