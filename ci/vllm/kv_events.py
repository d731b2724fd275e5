"""KV events of vLLM and SGLang over ZMQ: the replay of all batches, and the blocks that an engine has in its prefix cache after them."""

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


def keys(event):
    """Returns what separates each of the event's blocks from others with the same tokens, such as a salt."""
    if "cache_salt" in event:
        return [(event["cache_salt"],)] * len(event["block_hashes"])
    return [tuple(of_block or ()) for of_block in event.get("extra_keys") or [None] * len(event.get("block_hashes", ()))]


def cache(batches):
    """Returns the blocks in the engine's device cache after these batches, by engine hash. The batches must start with the first one."""
    blocks = {}
    for expected, (sequence, events) in enumerate(batches):
        assert sequence == expected, f"batch {expected} is missing: the engine's buffer no longer has it"
        for event in events:
            if event["type"] == "AllBlocksCleared":
                blocks.clear()
            elif event["medium"] == "GPU" and event["type"] == "BlockStored":
                parent, size, extra_keys = event["parent_block_hash"], event["block_size"], keys(event)
                for index, block_hash in enumerate(event["block_hashes"]):
                    blocks[block_hash] = Block(parent, tuple(event["token_ids"][index * size : (index + 1) * size]), extra_keys[index])
                    parent = block_hash
            elif event["medium"] == "GPU" and event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    blocks.pop(block_hash, None)
    return blocks


def chains(blocks):
    """Returns, for each cached block whose ancestors are cached, all tokens of the chain up to it and the keys of its first block."""
    found = set()
    for block in blocks.values():
        tokens, extra_keys = [], ()
        while block is not None:
            tokens.append(block.token_ids)
            extra_keys, parent = block.extra_keys, block.parent
            block = blocks.get(parent) if parent is not None else None
            if block is None and parent is not None:
                break
        else:
            found.add((tuple(token for part in reversed(tokens) for token in part), extra_keys))
    return found
