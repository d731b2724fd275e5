//! Direct transfers of KV memory from engine to engine.

use super::{models::*, *};
use tandem_kv::{CommunicatorEnd, DeviceTransferError};
use tandem_model::ModelFile;

const TOKENS: [TokenId; 30] = [3; 30];

fn model() -> impl ModelFile {
    gguf(goldens::models().into_iter().find(|(name, _)| *name == "qwen3-bf16").unwrap().1)
}

/// Returns an engine on a device of its own, with the KV of some tokens in these blocks.
fn filled(blocks: &[BlockId]) -> Runner<Emulated> {
    let mut engine = engine(&model(), 0);
    run(&mut engine, &TOKENS, blocks, &[30]);
    engine
}

/// Pairs of a source and a destination block: five consecutive blocks, two blocks in descending order, and the last block of the source.
const MOVES: [(u32, u32); 8] = [(3, 9), (4, 10), (5, 11), (6, 12), (7, 13), (2, 40), (1, 41), (63, 0)];

fn moves() -> Vec<(BlockId, BlockId)> {
    MOVES.map(|(from, to)| (BlockId(from), BlockId(to))).to_vec()
}

fn assert_moved(from: &Runner<Emulated>, to: &Runner<Emulated>) {
    for (block, moved) in moves() {
        assert!(read(from, block) == read(to, moved), "{block:?} is not in {moved:?}");
    }
}

#[test]
fn blocks_are_copied_from_another_process_whose_memory_is_unmapped_on_drop() {
    let source = filled(&[7, 6, 5, 4, 3, 2, 1, 63].map(BlockId));
    let destination = filled(&[60, 61, 62, 30, 31, 32, 33, 34].map(BlockId));
    let (ours, theirs) = (destination.kv_memory().unwrap(), source.kv_memory().unwrap());
    let mut handle = theirs.ipc_handle().unwrap();
    // The changed handle seems to come from another process. An IPC handle is opened only if it comes from another process.
    handle[16] ^= 1;
    let taken = destination.device().allocated_bytes();
    let peer = ours.open_peer(&handle).unwrap();
    assert!(destination.device().allocated_bytes() > taken, "the memory is mapped");
    let before = read(&destination, BlockId(60));
    peer.copy(&moves()).unwrap();
    assert_moved(&source, &destination);
    assert!(read(&destination, BlockId(60)) == before, "other blocks are unchanged");
    assert!(
        matches!(peer.copy(&[(BlockId(64), BlockId(0))]), Err(DeviceTransferError::Unreachable(_))),
        "the pool has 64 blocks"
    );
    drop(peer);
    assert_eq!(destination.device().allocated_bytes(), taken, "the memory is unmapped");
}

#[test]
fn engines_of_one_process_copy_without_ipc() {
    let model = load(&model(), 0);
    let [mut source, destination] = [0, 1].map(|_| Runner::new(Arc::clone(&model), LIMITS).unwrap());
    run(&mut source, &TOKENS, &[7, 6, 5, 4, 3, 2, 1, 63].map(BlockId), &[30]);
    let peer = destination.kv_memory().unwrap().open_peer(&source.kv_memory().unwrap().ipc_handle().unwrap()).unwrap();
    peer.copy(&moves()).unwrap();
    assert_moved(&source, &destination);
}

#[test]
fn handle_of_another_host_or_layout_is_refused() {
    let engine = filled(&[0, 1, 2, 3, 4, 5, 6, 7].map(BlockId));
    let memory = engine.kv_memory().unwrap();
    let handle = memory.ipc_handle().unwrap();
    let refused = |handle: &[u8]| match memory.open_peer(handle) {
        Err(DeviceTransferError::Unreachable(why)) => why,
        Err(other) => other.to_string(),
        Ok(_) => panic!("the handle must be refused"),
    };
    let changed = |at: usize| {
        let mut handle = handle.clone();
        handle[at] ^= 1;
        handle
    };
    assert_eq!(refused(&changed(0)), "the other worker is on another host");
    assert_eq!(refused(&changed(32)), "the worker's KV layout or tensor-parallel degree differs");
    let two = [&handle[..], &handle[52..]].concat();
    assert_eq!(refused(&two), "the worker's KV layout or tensor-parallel degree differs");
    // Two handles must be refused. One is of another process, and claims too many blocks. The other names an engine that does not exist in
    // this process.
    let other = filled(&[0; 8].map(BlockId));
    let (mut oversized, mut ended) = (other.kv_memory().unwrap().ipc_handle().unwrap(), handle.clone());
    (oversized[16], oversized[43]) = (oversized[16] ^ 1, 0xff);
    assert_eq!(refused(&oversized), "the worker's memory is smaller than the IPC handle says");
    ended[51] = 0xff;
    assert_eq!(refused(&ended), "the worker's engine has ended");
    for other in [&handle[1..], &[&handle[..], &[0]].concat(), &[]] {
        assert_eq!(refused(other), "the IPC handle is invalid or from another version");
    }
}

#[test]
fn nccl_transfers_wanted_blocks_and_discards_others() {
    let source = filled(&[7, 6, 5, 4, 3, 2, 1, 63].map(BlockId));
    let destination = filled(&[60, 61, 62, 30, 31, 32, 33, 34].map(BlockId));
    let (ours, theirs) = (destination.kv_memory().unwrap(), source.kv_memory().unwrap());
    let name = ours.new_communicator_id().unwrap();
    assert_eq!((name.len(), ours.nccl_ranks()), (128, 1));
    assert!(name != ours.new_communicator_id().unwrap(), "communicator ids are unique");
    assert!(matches!(theirs.join(&name[1..], CommunicatorEnd::Sender), Err(DeviceTransferError::Unreachable(_))));
    let (sends, receives) =
        (theirs.join(&name, CommunicatorEnd::Sender).unwrap(), ours.join(&name, CommunicatorEnd::Receiver).unwrap());
    let from: Vec<BlockId> = moves().iter().map(|(from, _)| *from).collect();
    let to: Vec<Option<BlockId>> = moves().iter().map(|(_, to)| Some(*to)).collect();
    let before = read(&destination, BlockId(60));
    sends.send(&from).unwrap();
    receives.receive(&[None; 8]).unwrap();
    sends.send(&from).unwrap();
    receives.receive(&to).unwrap();
    assert_moved(&source, &destination);
    assert!(read(&destination, BlockId(60)) == before, "other blocks are unchanged");
    drop(receives);
    assert!(matches!(sends.send(&from), Err(DeviceTransferError::Failed(_))), "the receiving end was dropped");
}

/// Moves blocks of a model on two GPUs, each of which holds its shard of every block.
#[test]
fn each_rank_transfers_its_shard_of_a_block() {
    let sharded = || Runner::new(load_sharded(&model(), 2, 0).unwrap(), LIMITS).unwrap();
    let (mut source, destination) = (sharded(), sharded());
    run(&mut source, &TOKENS, &[7, 6, 5, 4, 3, 2, 1, 63].map(BlockId), &[30]);
    let (ours, theirs) = (destination.kv_memory().unwrap(), source.kv_memory().unwrap());
    let mut handle = theirs.ipc_handle().unwrap();
    handle[16] ^= 1;
    ours.open_peer(&handle).unwrap().copy(&moves()).unwrap();
    assert_moved(&source, &destination);
    let another = sharded();
    let (ours, name) = (another.kv_memory().unwrap(), ours.new_communicator_id().unwrap());
    let (sends, receives) =
        (theirs.join(&name, CommunicatorEnd::Sender).unwrap(), ours.join(&name, CommunicatorEnd::Receiver).unwrap());
    let from: Vec<BlockId> = moves().iter().map(|(from, _)| *from).collect();
    let to: Vec<Option<BlockId>> = moves().iter().map(|(_, to)| Some(*to)).collect();
    sends.send(&from).unwrap();
    receives.receive(&to).unwrap();
    assert_moved(&source, &another);
    let alone = filled(&[0; 8].map(BlockId)).kv_memory().unwrap();
    assert!(matches!(alone.open_peer(&handle), Err(DeviceTransferError::Unreachable(_))), "tensor-parallel degrees differ");
}

#[test]
fn copies_of_open_memory_work_after_their_engine_was_dropped() {
    let source = filled(&[7, 6, 5, 4, 3, 2, 1, 63].map(BlockId));
    let destination = filled(&[0; 8].map(BlockId));
    let mut handle = source.kv_memory().unwrap().ipc_handle().unwrap();
    handle[16] ^= 1;
    let peer = destination.kv_memory().unwrap().open_peer(&handle).unwrap();
    drop(destination);
    // `peer` keeps the memory of the dropped engine allocated.
    peer.copy(&moves()).unwrap();
}
