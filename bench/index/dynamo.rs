//! Dynamo's radix tree. It serves one thread, so it is not part of the measurement with two threads.

use crate::{Index, timed};
use dynamo_kv_router::{
    RadixTree,
    protocols::{
        ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData,
        LocalBlockHash, OverlapScores, RouterEvent,
    },
};
use std::{cell::RefCell, time::Duration};
use tandem_kv::{Change, SequenceHash, StoredChain};

pub struct Tree(RefCell<RadixTree>);

impl Index for Tree {
    const NAME: &'static str = "dynamo";
    type Writer = ();
    // The tree takes events and prompts by value.
    type Event = RefCell<Option<RouterEvent>>;
    type Prompt = RefCell<Vec<LocalBlockHash>>;
    type Answer = OverlapScores;

    fn new(_: u32) -> (Self, ()) {
        (Self(RefCell::new(RadixTree::new())), ())
    }

    fn event(worker: u32, change: &Change) -> Self::Event {
        let hash = |hash: &SequenceHash| ExternalSequenceBlockHash(hash.0);
        let data = match change {
            Change::Stored(StoredChain { parent, sequence_hashes }) => {
                let block = |block: &SequenceHash| KvCacheStoredBlockData {
                    block_hash: hash(block),
                    tokens_hash: LocalBlockHash(block.0),
                    mm_extra_info: None,
                };
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: parent.as_ref().map(hash),
                    start_position: None,
                    blocks: sequence_hashes.iter().map(block).collect(),
                })
            }
            Change::Removed(hashes) => {
                KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: hashes.iter().map(hash).collect() })
            }
            Change::Cleared => KvCacheEventData::Cleared,
        };
        RefCell::new(Some(RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })))
    }

    fn apply(&self, (): &mut (), event: &Self::Event) {
        let event = event.take().expect("an event is applied once");
        self.0.borrow_mut().apply_event(event).expect("the blocks are known");
    }

    fn prompt(prompt: &[SequenceHash]) -> Self::Prompt {
        RefCell::new(prompt.iter().map(|hash| LocalBlockHash(hash.0)).collect())
    }

    fn overlap(&self, prompt: &Self::Prompt, _: u32) -> OverlapScores {
        self.0.borrow().find_matches(prompt.take(), false)
    }

    fn leading(answer: OverlapScores, workers: u32) -> Vec<u32> {
        let mut leading = vec![0; workers as usize];
        answer.scores.iter().for_each(|(worker, blocks)| leading[worker.worker_id as usize] = *blocks);
        leading
    }

    fn remove(&self, (): &mut (), worker: u32) -> Duration {
        timed(|| self.0.borrow_mut().remove_worker(u64::from(worker)))
    }
}
