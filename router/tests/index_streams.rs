//! The index replays recorded event streams of a cluster. Each query in a stream carries its expected answer.
//!
//! The recordings are large and not part of the repository; without them the test prints that it is skipped.

use std::{io::Read, path::Path};
use tandem_kv::{Change, SequenceHash, StoredChain};
use tandem_router::{PrefixIndex, Skipped, WorkerSlot};

/// The ids of a prompt's blocks. A stream names stored blocks by their positions in the prompt of the last query.
type Blocks = Vec<u32>;

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

    fn worker(&mut self) -> WorkerSlot {
        WorkerSlot(self.number())
    }
}

/// Returns a block's sequence hash. In these streams a block id identifies a whole prefix, and `mix` is a bijection, so its output can
/// serve as the hash.
fn hash(block: u32) -> SequenceHash {
    SequenceHash(tandem_kv::mix(u64::from(block) + 1))
}

/// Replays the stream. Returns how many queries were answered.
fn replay(stream: &[u8]) -> usize {
    let mut reader = Reader(stream);
    assert_eq!(&reader.bytes::<8>(), b"KVRS0001");
    let [_workers, _block_tokens, sub, ..]: [u32; 6] = std::array::from_fn(|_| u32::from_le_bytes(reader.bytes()));
    let ops = u64::from_le_bytes(reader.bytes());
    let (mut index, mut asked, mut queries) = (PrefixIndex::new(3), Blocks::new(), 0);
    for op in 0..ops {
        let (worker, change) = match reader.bytes() {
            [0] => {
                query(&mut reader, &index, &mut asked, sub);
                queries += 1;
                continue;
            }
            [1] => {
                let (worker, start, end) = (reader.worker(), reader.number() as usize, reader.number() as usize);
                let parent = start.checked_sub(1).map(|before| hash(asked[before]));
                let sequence_hashes = asked[start..end].iter().map(|block| hash(*block)).collect();
                (worker, Change::Stored(StoredChain { parent, sequence_hashes }))
            }
            [2] => {
                let (worker, runs) = (reader.worker(), reader.number());
                let (mut removed, mut first) = (Vec::new(), 0);
                for _ in 0..runs {
                    first = reader.delta(first);
                    removed.extend((0..reader.number()).map(|back| hash(first - back)));
                }
                (worker, Change::Removed(removed))
            }
            [3] => {
                let (worker, parent, first, count) = (reader.worker(), reader.number(), reader.number(), reader.number());
                let sequence_hashes = (first..first + count).map(hash).collect();
                (worker, Change::Stored(StoredChain { parent: Some(hash(parent)), sequence_hashes }))
            }
            [4] => (reader.worker(), Change::Cleared),
            [tag] => panic!("operation {op} has the unknown tag {tag}"),
        };
        assert_eq!(index.apply(worker, &change), Skipped::default(), "operation {op}");
    }
    assert!(reader.0.is_empty());
    queries
}

fn query(reader: &mut Reader<'_>, index: &PrefixIndex, asked: &mut Blocks, sub: u32) {
    let (len_blocks, ids) = (reader.number() as usize, reader.number());
    asked.clear();
    let mut id = 0;
    for _ in 0..ids {
        id = reader.delta(id);
        asked.extend(id * sub..(id + 1) * sub);
    }
    asked.truncate(len_blocks);
    let (workers, max, check) = (reader.number() as usize, reader.number(), u64::from_le_bytes(reader.bytes()));
    let hashes: Vec<SequenceHash> = asked.iter().map(|block| hash(*block)).collect();
    let leading = index.overlap(&hashes);
    assert_eq!(leading.iter().max().copied().unwrap_or(0), max);
    let holders = leading.iter().enumerate().filter(|(_, blocks)| **blocks > 0);
    let sum =
        |sum: u64, (worker, blocks): (usize, &u32)| sum.wrapping_add(tandem_kv::mix((worker as u64) << 32 | u64::from(*blocks)));
    assert_eq!(holders.clone().count(), workers);
    assert_eq!(holders.fold(0, sum), check);
}

#[test]
fn index_answers_every_query_of_the_recorded_streams_correctly() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/index_streams");
    for name in ["conv_w64_b64", "conv_w512_b16"] {
        let Ok(packed) = std::fs::read(folder.join(name).with_extension("bin.zst")) else {
            let mut stderr = std::io::stderr();
            std::io::Write::write_all(&mut stderr, format!("SKIPPED: no recorded stream {name}\n").as_bytes())
                .expect("stderr is writable");
            continue;
        };
        let mut stream = Vec::new();
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed.as_slice()).expect("the recorded stream is zstd");
        decoder.read_to_end(&mut stream).expect("the recorded stream is complete");
        assert!(replay(&stream) > 1_000, "{name} has queries");
    }
}
