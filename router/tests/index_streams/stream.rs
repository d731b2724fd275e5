//! Reads recorded event streams of a cluster. Each query in a stream carries its expected answer.

use std::{io::Read, path::Path};
use tandem_kv::{Change, SequenceHash, StoredChain};

/// A recorded stream.
pub struct Stream {
    pub workers: u32,
    pub ops: Vec<Op>,
}

pub enum Op {
    /// A prompt, and the leading blocks of it that each worker has cached.
    Query { prompt: Vec<SequenceHash>, expected: Expected },
    /// A change of a worker's cache.
    Change { worker: u32, change: Change },
}

/// A summary of an answer: the number of workers that have cached leading blocks, the most leading blocks, and a checksum.
#[derive(Debug, PartialEq, Eq)]
pub struct Expected {
    workers: usize,
    max: u32,
    check: u64,
}

impl Expected {
    /// Returns the summary of this answer, which has each worker's number of leading blocks.
    pub fn of(leading: &[u32]) -> Self {
        let holders = leading.iter().enumerate().filter(|(_, blocks)| **blocks > 0);
        let sum = |sum: u64, (worker, blocks): (usize, &u32)| {
            sum.wrapping_add(tandem_kv::mix((worker as u64) << 32 | u64::from(*blocks)))
        };
        Self { workers: holders.clone().count(), max: leading.iter().max().copied().unwrap_or(0), check: holders.fold(0, sum) }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk::<N>().expect("the stream is complete");
        self.0 = rest;
        *head
    }

    fn varint(&mut self) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let [byte] = self.bytes();
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return value;
            }
            shift += 7;
        }
    }

    fn number(&mut self) -> u32 {
        self.varint().try_into().expect("the number has at most 32 bits")
    }

    /// Reads a number that is stored as its difference to `before`, in a zig-zag varint.
    fn delta(&mut self, before: u32) -> u32 {
        let value = self.varint();
        let delta = (value >> 1) as i64 ^ -((value & 1) as i64);
        (i64::from(before) + delta).try_into().expect("the number has at most 32 bits")
    }
}

/// Returns a block's sequence hash. In these streams a block id identifies a whole prefix, and `mix` is a bijection, so its output can
/// serve as the hash.
fn hash(block: u32) -> SequenceHash {
    SequenceHash(tandem_kv::mix(u64::from(block) + 1))
}

impl Stream {
    /// Reads the stream of this name; `None` if the folder does not have it.
    pub fn read(folder: &Path, name: &str) -> Option<Self> {
        let packed = std::fs::read(folder.join(name).with_extension("bin.zst")).ok()?;
        let mut stream = Vec::new();
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed.as_slice()).expect("the recorded stream is zstd");
        decoder.read_to_end(&mut stream).expect("the recorded stream is complete");
        Some(Self::parse(&stream))
    }

    fn parse(stream: &[u8]) -> Self {
        let mut reader = Reader(stream);
        assert_eq!(&reader.bytes::<8>(), b"KVRS0001");
        let [workers, _block_tokens, sub, ..]: [u32; 6] = std::array::from_fn(|_| u32::from_le_bytes(reader.bytes()));
        let count = u64::from_le_bytes(reader.bytes());
        // A stream names stored blocks by their positions in the prompt of the last query.
        let mut prompt: Vec<SequenceHash> = Vec::new();
        let chain = |parent, sequence_hashes| Change::Stored(StoredChain { parent, sequence_hashes });
        let read = |op: u64| match reader.bytes() {
            [0] => {
                let expected;
                (prompt, expected) = query(&mut reader, sub);
                Op::Query { prompt: prompt.clone(), expected }
            }
            [1] => {
                let (worker, start, end) = (reader.number(), reader.number() as usize, reader.number() as usize);
                Op::Change { worker, change: chain(start.checked_sub(1).map(|at| prompt[at]), prompt[start..end].to_vec()) }
            }
            [2] => {
                let (worker, runs, mut removed, mut first) = (reader.number(), reader.number(), Vec::new(), 0);
                for _ in 0..runs {
                    first = reader.delta(first);
                    removed.extend((0..reader.number()).map(|back| hash(first - back)));
                }
                Op::Change { worker, change: Change::Removed(removed) }
            }
            [3] => {
                let (worker, parent, first, count) = (reader.number(), reader.number(), reader.number(), reader.number());
                Op::Change { worker, change: chain(Some(hash(parent)), (first..first + count).map(hash).collect()) }
            }
            [4] => Op::Change { worker: reader.number(), change: Change::Cleared },
            [tag] => panic!("operation {op} has the unknown tag {tag}"),
        };
        let ops = (0..count).map(read).collect();
        assert!(reader.0.is_empty());
        Self { workers, ops }
    }
}

fn query(reader: &mut Reader<'_>, sub: u32) -> (Vec<SequenceHash>, Expected) {
    let (len_blocks, ids, mut prompt, mut id) = (reader.number() as usize, reader.number(), Vec::new(), 0);
    for _ in 0..ids {
        id = reader.delta(id);
        prompt.extend((id * sub..(id + 1) * sub).map(hash));
    }
    prompt.truncate(len_blocks);
    let (workers, max, check) = (reader.number() as usize, reader.number(), u64::from_le_bytes(reader.bytes()));
    (prompt, Expected { workers, max, check })
}
