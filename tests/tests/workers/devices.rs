//! Tests of transfers from device to device: the decode worker copies blocks, or the prefill worker sends them over an NCCL communicator.

use crate::{
    device_memory::DeviceAccess,
    harness::{BLOCK_BYTES, Cluster, Setup, TIMEOUT, Worker, prompt},
};
use std::{sync::atomic::Ordering, time::Duration};
use tandem_devices::sim::SimSettings;
use tandem_proto::v1::{FailureReason, generate_reply::Message};
use tandem_transfer::TransferMode;

/// Returns the settings of devices on one host, on which the decode worker can open the prefill worker's memory.
fn one_host() -> DeviceAccess {
    DeviceAccess { ipc: true, ..DeviceAccess::default() }
}

/// Returns the settings of devices on two hosts, which transfer blocks over NCCL.
fn two_hosts() -> DeviceAccess {
    DeviceAccess { nccl: true, ..DeviceAccess::default() }
}

fn setup(access: &DeviceAccess) -> Setup {
    Setup { access: Some(access.clone()), ..Setup::default() }
}

async fn cluster(access: &DeviceAccess) -> Cluster {
    Cluster::start(setup(access), setup(access)).await
}

fn transferred_bytes(worker: &Worker, transport: &str) -> f64 {
    let (name, direction) = (&worker.info.worker_id, if worker.info.role == 1 { "sent" } else { "received" });
    let labels = format!(r#"{{worker="{name}",transport="{transport}",direction="{direction}"}}"#);
    worker.metric(&format!("tandem_worker_kv_transfer_bytes_total{labels}"))
}

/// Returns the metric label of the transfer path between two workers with these devices, once the path is prepared.
fn path_label(access: &DeviceAccess) -> &'static str {
    match access {
        DeviceAccess { ipc: true, .. } => "cuda_ipc",
        DeviceAccess { nccl: true, .. } => "nccl",
        _ => "tcp",
    }
}

/// Sends prompts until the blocks of one prompt are transferred from device to device. Returns the number of prompts that were sent before
/// that one. The prompts are numbered from `first` on; the tests must not use these numbers for their own prompts.
async fn prompts_until_path_is_used(cluster: &Cluster, access: &DeviceAccess, first: u32) -> u32 {
    let path = path_label(access);
    let before = transferred_bytes(&cluster.decode, path);
    let sending = async {
        for number in first.. {
            assert_eq!(cluster.answer(cluster.remote(prompt(number, 33), 2)).await.failure, None);
            if transferred_bytes(&cluster.decode, path) > before {
                return number - first;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        unreachable!("the loop never ends")
    };
    tokio::time::timeout(TIMEOUT, sending).await.expect("the first prompt's ticket prepares the path")
}

#[tokio::test]
async fn every_transfer_path_gives_the_text_of_local_prefill() {
    for (access, path) in [(one_host(), "cuda_ipc"), (two_hosts(), "nccl"), (DeviceAccess::default(), "tcp")] {
        let (cluster, alone) = (cluster(&access).await, Cluster::start(Setup::default(), Setup::default()).await);
        if path != "tcp" {
            assert!(prompts_until_path_is_used(&cluster, &access, 100).await > 0, "the first prompt's blocks are sent over TCP");
        }
        let before = transferred_bytes(&cluster.decode, path);
        for (number, len) in [(1, 1), (2, 2), (3, 16), (4, 17), (5, 33), (6, 100), (7, 1_000)] {
            let (mut remote, mut local) = (cluster.remote(prompt(number, len), 24), alone.local(prompt(number, len), 24));
            (remote.samples, local.samples) = (3, 3);
            let (remote, local) = (cluster.answer(remote).await, alone.answer(local).await);
            assert_eq!((&remote.failure, &remote.tokens), (&None, &local.tokens), "a prompt of {len} over {path}");
            assert_eq!(remote.kv_transfer_bytes(), u64::from((len - 1).div_ceil(16)) * BLOCK_BYTES);
        }
        let sent: u64 = [1_u64, 15, 16, 32, 99, 999].iter().map(|tokens| tokens.div_ceil(16) * BLOCK_BYTES).sum();
        assert_eq!(transferred_bytes(&cluster.decode, path) - before, sent as f64, "{path}");
        assert_eq!(transferred_bytes(&cluster.prefill, path), transferred_bytes(&cluster.decode, path));
        // Received blocks must be cached like computed blocks.
        let again = cluster.answer(cluster.local(prompt(7, 1_000), 4)).await;
        assert_eq!(again.cached_tokens(), Some(992), "{path}");
        cluster.idle().await;
        let open = *access.open_memories.borrow();
        assert!(open <= 1, "{open} memories are open: one stays open for the peer's next prompt");
    }
}

#[tokio::test]
async fn workers_without_a_common_device_path_use_tcp() {
    let tcp_only = |access| Setup { transfer_mode: TransferMode::Tcp, ..setup(access) };
    let both = DeviceAccess { ipc: true, nccl: true, ..DeviceAccess::default() };
    for (prefill, decode) in [
        (tcp_only(&both), setup(&both)),
        (setup(&both), tcp_only(&both)),
        (setup(&one_host()), setup(&two_hosts())),
        (setup(&both), Setup::default()),
    ] {
        let cluster = Cluster::start(prefill, decode).await;
        for number in 0..4 {
            assert_eq!(cluster.answer(cluster.remote(prompt(number, 100), 4)).await.failure, None);
        }
        assert_eq!(transferred_bytes(&cluster.decode, "tcp"), (4 * 7 * BLOCK_BYTES) as f64);
        cluster.idle().await;
    }
}

#[tokio::test]
async fn blocks_being_written_are_kept_until_the_write_ends() {
    for access in [one_host(), two_hosts()] {
        let cluster = cluster(&access).await;
        prompts_until_path_is_used(&cluster, &access, 100).await;
        cluster.idle().await;
        access.copy_gate.close();
        // The prompt is one chunk, so all of its blocks are in flight at the same time.
        let mut leaving = cluster.open(cluster.remote(prompt(1, 60), 4)).await;
        leaving.scheduled().await;
        access.copy_gate.reached().await;
        // The transfer must continue after the client has disconnected.
        drop(leaving);
        cluster.prefill.idle().await;
        cluster.decode.until(|load| load.waiting_requests == 0 && load.running_sequences == 0 && load.in_use_blocks == 4).await;
        access.copy_gate.open();
        cluster.idle().await;
        // The transfer was not confirmed, so its blocks are not cached.
        let next = cluster.answer(cluster.local(prompt(1, 60), 4)).await;
        assert_eq!((next.failure.clone(), next.cached_tokens()), (None, Some(0)));
        let again = cluster.answer(cluster.remote(prompt(2, 100), 4)).await;
        assert_eq!(again.failure, None, "later transfers over the path succeed");
        cluster.idle().await;
    }
}

#[tokio::test]
async fn prefill_worker_that_crashes_during_a_copy_is_reported_lost() {
    let access = one_host();
    let mut cluster = cluster(&access).await;
    prompts_until_path_is_used(&cluster, &access, 100).await;
    access.copy_gate.close();
    let mut replies = cluster.open(cluster.remote(prompt(1, 100), 4)).await;
    replies.scheduled().await;
    access.copy_gate.reached().await;
    cluster.prefill.kill();
    let Some(Message::Failure(failure)) = replies.next().await else { panic!("the copied blocks must not be confirmed") };
    assert_eq!((failure.reason(), failure.instance_id), (FailureReason::WorkerEnded, cluster.prefill.info.instance_id.clone()));
    access.copy_gate.open();
    cluster.decode.idle().await;
    assert_eq!(cluster.answer(cluster.local(prompt(1, 100), 4)).await.cached_tokens(), Some(0));
}

#[tokio::test]
async fn broken_communicator_fails_one_attempt_and_is_replaced() {
    let access = two_hosts();
    let cluster = cluster(&access).await;
    prompts_until_path_is_used(&cluster, &access, 100).await;
    access.break_next_batch.store(1, Ordering::Relaxed);
    let lost = (FailureReason::PrefillLost, cluster.prefill.info.instance_id.clone());
    assert_eq!(cluster.failure(cluster.remote(prompt(1, 100), 4)).await, lost);
    cluster.idle().await;
    // Both workers have closed the communicator. The blocks of the next prompts are sent over TCP until there is a new communicator.
    assert!(prompts_until_path_is_used(&cluster, &access, 150).await > 0);
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_sent_with_a_spent_ticket_are_discarded_and_change_no_answer() {
    let access = two_hosts();
    let cluster = cluster(&access).await;
    let alone = Cluster::start(Setup::default(), Setup::default()).await;
    prompts_until_path_is_used(&cluster, &access, 100).await;
    for round in 0..5 {
        access.copy_gate.close();
        // Each prompt has several chunks, so that more messages are sent after its client has disconnected.
        let mut leave = Vec::new();
        for number in 0..3 {
            let mut leaving = cluster.open(cluster.remote(prompt(round * 10 + number, 300), 4)).await;
            leaving.scheduled().await;
            leave.push(leaving);
        }
        access.copy_gate.reached().await;
        let staying = cluster.open(cluster.remote(prompt(round * 10 + 9, 300), 8)).await;
        drop(leave);
        access.copy_gate.open();
        let staying = staying.answer().await;
        let expected = alone.answer(alone.local(prompt(round * 10 + 9, 300), 8)).await;
        assert_eq!((&staying.failure, &staying.tokens), (&None, &expected.tokens));
        cluster.idle().await;
    }
}

#[tokio::test]
async fn draining_worker_closes_its_communicators() {
    let access = two_hosts();
    for prefill_first in [false, true] {
        let mut cluster = cluster(&access).await;
        prompts_until_path_is_used(&cluster, &access, 100).await;
        let leaving = if prefill_first { &mut cluster.prefill } else { &mut cluster.decode };
        let (shutdown, ended) = (leaving.shutdown.clone(), &mut leaving.ended);
        shutdown.run(TIMEOUT).await;
        assert!(
            tokio::time::timeout(TIMEOUT, ended).await.expect("the worker ends in time").expect("the worker reports its result"),
            "the worker ends without an error"
        );
    }
}

#[tokio::test]
async fn prefill_worker_whose_engine_fails_during_a_copy_confirms_no_block() {
    let access = one_host();
    let cluster = cluster(&access).await;
    prompts_until_path_is_used(&cluster, &access, 100).await;
    access.copy_gate.close();
    let mut replies = cluster.open(cluster.remote(prompt(1, 60), 4)).await;
    replies.scheduled().await;
    access.copy_gate.reached().await;
    cluster.prefill.gate.fail_next();
    // The step of another prompt fails, so the engine drops all of its jobs and blocks.
    assert!(cluster.answer(cluster.remote(prompt(2, 30), 4)).await.failure.is_some());
    access.copy_gate.open();
    let Some(Message::Failure(failure)) = replies.next().await else { panic!("the copied blocks must not be confirmed") };
    assert_eq!(failure.instance_id, cluster.prefill.info.instance_id);
    cluster.idle().await;
    assert_eq!(cluster.answer(cluster.local(prompt(1, 60), 4)).await.cached_tokens(), Some(0));
}

#[tokio::test]
async fn clients_that_disconnect_at_any_moment_leak_no_blocks_and_break_no_communicator() {
    for access in [one_host(), two_hosts()] {
        let sim = SimSettings { speedup: 20.0, ..Default::default() };
        let quick = Setup { sim, ..setup(&access) };
        let cluster = Cluster::start(quick.clone(), quick).await;
        prompts_until_path_is_used(&cluster, &access, 100).await;
        let over_tcp = transferred_bytes(&cluster.decode, "tcp");
        let requests = (0..60_u32).map(|number| {
            let cluster = &cluster;
            async move {
                let mut replies = cluster.open(cluster.remote(prompt(number % 7, 50 + number * 11), 40)).await;
                let messages_max = if number % 2 == 0 { number as usize / 4 } else { usize::MAX };
                let mut received = 0;
                while received < messages_max
                    && let Some(message) = replies.next().await
                {
                    assert!(!matches!(message, Message::Failure(_)), "{message:?}");
                    received += 1;
                }
            }
        });
        futures::future::join_all(requests).await;
        cluster.idle().await;
        assert_eq!(transferred_bytes(&cluster.decode, "tcp"), over_tcp, "all blocks took the device path");
        assert_eq!(cluster.refused_live_writes(), 0.0, "late blocks of disconnected clients do not count as an attack");
        let open = *access.open_memories.borrow();
        assert!(open <= 1, "{open} memories are open: one stays open for the peer's next prompt");
    }
}
