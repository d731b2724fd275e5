//! Blocks that move from device to device: copied by the decode worker, or sent over an NCCL communicator.

use crate::{
    harness::{BLOCK_BYTES, Cluster, SOON, Setup, Worker, prompt},
    reach::Reach,
};
use std::{sync::atomic::Ordering, time::Duration};
use tandem_engine::sim::SimSettings;
use tandem_proto::v1::{FailureReason, generate_reply::Message};
use tandem_transfer::TransferMode;

/// One host: the decode worker opens the prefill worker's memory.
fn shared() -> Reach {
    Reach { shares: true, ..Reach::default() }
}

/// Two hosts with NCCL.
fn linked() -> Reach {
    Reach { links: true, ..Reach::default() }
}

fn setup(reach: &Reach) -> Setup {
    Setup { reach: Some(reach.clone()), ..Setup::default() }
}

async fn cluster(reach: &Reach) -> Cluster {
    Cluster::start(setup(reach), setup(reach)).await
}

fn moved(worker: &Worker, transport: &str) -> f64 {
    let (name, direction) = (&worker.info.worker_id, if worker.info.role == 1 { "sent" } else { "received" });
    let labels = format!(r#"{{worker="{name}",transport="{transport}",direction="{direction}"}}"#);
    worker.metric(&format!("tandem_worker_kv_transfer_bytes_total{labels}"))
}

/// Returns the label of the path between such workers once it is prepared.
fn path_label(reach: &Reach) -> &'static str {
    match reach {
        Reach { shares: true, .. } => "cuda_ipc",
        Reach { links: true, .. } => "nccl",
        _ => "tcp",
    }
}

/// Sends prompts that have nothing in common with those of the tests (numbers repeat after 250), until the blocks of one go from device to
/// device. Returns how many did not.
async fn until_reached(cluster: &Cluster, reach: &Reach, first: u32) -> u32 {
    let way = path_label(reach);
    let before = moved(&cluster.decode, way);
    let trying = async {
        for number in first.. {
            assert_eq!(cluster.answer(cluster.remote(prompt(number, 33), 2)).await.failure, None);
            if moved(&cluster.decode, way) > before {
                return number - first;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        unreachable!("numbers do not end")
    };
    tokio::time::timeout(SOON, trying).await.expect("the first prompt's ticket prepares the path")
}

#[tokio::test]
async fn every_transfer_path_gives_the_text_of_local_prefill() {
    for (reach, way) in [(shared(), "cuda_ipc"), (linked(), "nccl"), (Reach::default(), "tcp")] {
        let (cluster, alone) = (cluster(&reach).await, Cluster::start(Setup::default(), Setup::default()).await);
        if way != "tcp" {
            assert!(until_reached(&cluster, &reach, 100).await > 0, "the first prompt's blocks go over TCP");
        }
        let before = moved(&cluster.decode, way);
        for (number, len) in [(1, 1), (2, 2), (3, 16), (4, 17), (5, 33), (6, 100), (7, 1_000)] {
            let (mut remote, mut local) = (cluster.remote(prompt(number, len), 24), alone.local(prompt(number, len), 24));
            (remote.samples, local.samples) = (3, 3);
            let (remote, local) = (cluster.answer(remote).await, alone.answer(local).await);
            assert_eq!((&remote.failure, &remote.tokens), (&None, &local.tokens), "a prompt of {len} over {way}");
            assert_eq!(remote.kv_transfer_bytes(), u64::from((len - 1).div_ceil(16)) * BLOCK_BYTES);
        }
        let sent: u64 = [1_u64, 15, 16, 32, 99, 999].iter().map(|tokens| tokens.div_ceil(16) * BLOCK_BYTES).sum();
        assert_eq!(moved(&cluster.decode, way) - before, sent as f64, "{way}");
        assert_eq!(moved(&cluster.prefill, way), moved(&cluster.decode, way));
        // What has come is cached, as if it had been computed here.
        let again = cluster.answer(cluster.local(prompt(7, 1_000), 4)).await;
        assert_eq!(again.cached_tokens(), Some(992), "{way}");
        cluster.idle().await;
        reach.closed().await;
    }
}

#[tokio::test]
async fn workers_that_may_not_or_cannot_use_device_paths_use_tcp() {
    let tcp_only = |reach| Setup { transfer_mode: TransferMode::Tcp, ..setup(reach) };
    let both = Reach { shares: true, links: true, ..Reach::default() };
    for (prefill, decode) in [
        (tcp_only(&both), setup(&both)),
        (setup(&both), tcp_only(&both)),
        (setup(&shared()), setup(&linked())),
        (setup(&both), Setup::default()),
    ] {
        let cluster = Cluster::start(prefill, decode).await;
        for number in 0..4 {
            assert_eq!(cluster.answer(cluster.remote(prompt(number, 100), 4)).await.failure, None);
        }
        assert_eq!(moved(&cluster.decode, "tcp"), (4 * 7 * BLOCK_BYTES) as f64);
        cluster.idle().await;
    }
}

#[tokio::test]
async fn blocks_being_written_are_kept_until_the_write_ends() {
    for reach in [shared(), linked()] {
        let cluster = cluster(&reach).await;
        until_reached(&cluster, &reach, 100).await;
        cluster.idle().await;
        reach.gate.close();
        // In one chunk, so that all of it is on its way.
        let mut leaves = cluster.open(cluster.remote(prompt(1, 60), 4)).await;
        leaves.scheduled().await;
        reach.gate.reached().await;
        // What is on its way does not end with its client.
        drop(leaves);
        cluster.prefill.idle().await;
        cluster.decode.until(|load| load.waiting_requests == 0 && load.running_sequences == 0 && load.in_use_blocks == 4).await;
        reach.gate.open();
        cluster.idle().await;
        // It was not confirmed, so it is not cached.
        let next = cluster.answer(cluster.local(prompt(1, 60), 4)).await;
        assert_eq!((next.failure.clone(), next.cached_tokens()), (None, Some(0)));
        let again = cluster.answer(cluster.remote(prompt(2, 100), 4)).await;
        assert_eq!(again.failure, None, "the path works as before");
        cluster.idle().await;
    }
}

#[tokio::test]
async fn prefill_worker_that_crashes_during_a_copy_is_reported_lost() {
    let reach = shared();
    let mut cluster = cluster(&reach).await;
    until_reached(&cluster, &reach, 100).await;
    reach.gate.close();
    let mut replies = cluster.open(cluster.remote(prompt(1, 100), 4)).await;
    replies.scheduled().await;
    reach.gate.reached().await;
    cluster.prefill.kill();
    let Some(Message::Failure(failure)) = replies.next().await else { panic!("the copied blocks must not be confirmed") };
    assert_eq!((failure.reason(), failure.instance_id), (FailureReason::PrefillLost, cluster.prefill.info.instance_id.clone()));
    reach.gate.open();
    cluster.decode.idle().await;
    assert_eq!(cluster.answer(cluster.local(prompt(1, 100), 4)).await.cached_tokens(), Some(0));
}

#[tokio::test]
async fn broken_communicator_fails_one_attempt_and_is_replaced() {
    let reach = linked();
    let cluster = cluster(&reach).await;
    until_reached(&cluster, &reach, 100).await;
    reach.breaks.store(1, Ordering::Relaxed);
    let lost = (FailureReason::PrefillLost, cluster.prefill.info.instance_id.clone());
    assert_eq!(cluster.failure(cluster.remote(prompt(1, 100), 4)).await, lost);
    cluster.idle().await;
    // Both ends have closed it: the next prompts go over TCP until there is a new one.
    assert!(until_reached(&cluster, &reach, 150).await > 0);
    cluster.idle().await;
}

#[tokio::test]
async fn batches_of_spent_tickets_are_discarded_without_harm_to_others() {
    let reach = linked();
    let cluster = cluster(&reach).await;
    let alone = Cluster::start(Setup::default(), Setup::default()).await;
    until_reached(&cluster, &reach, 100).await;
    for round in 0..5 {
        reach.gate.close();
        // Several chunks each, so that there are more messages after the client has disconnected.
        let mut leave = Vec::new();
        for number in 0..3 {
            let mut leaves = cluster.open(cluster.remote(prompt(round * 10 + number, 300), 4)).await;
            leaves.scheduled().await;
            leave.push(leaves);
        }
        reach.gate.reached().await;
        let stays = cluster.open(cluster.remote(prompt(round * 10 + 9, 300), 8)).await;
        drop(leave);
        reach.gate.open();
        let stays = stays.answer().await;
        let expected = alone.answer(alone.local(prompt(round * 10 + 9, 300), 8)).await;
        assert_eq!((&stays.failure, &stays.tokens), (&None, &expected.tokens));
        cluster.idle().await;
    }
}

#[tokio::test]
async fn draining_worker_closes_its_communicators() {
    let reach = linked();
    for prefill_first in [false, true] {
        let mut cluster = cluster(&reach).await;
        until_reached(&cluster, &reach, 100).await;
        let leaves = if prefill_first { &mut cluster.prefill } else { &mut cluster.decode };
        let (shutdown, ended) = (leaves.shutdown.clone(), &mut leaves.ended);
        shutdown.run(SOON).await;
        assert!(tokio::time::timeout(SOON, ended).await.expect("it ends at once").expect("it says how"), "in order");
    }
}

#[tokio::test]
async fn engine_that_fails_during_a_copy_confirms_nothing() {
    let reach = shared();
    let cluster = cluster(&reach).await;
    until_reached(&cluster, &reach, 100).await;
    reach.gate.close();
    let mut replies = cluster.open(cluster.remote(prompt(1, 60), 4)).await;
    replies.scheduled().await;
    reach.gate.reached().await;
    cluster.prefill.gate.fail_next();
    // Another prompt's step fails, and with it goes all that the engine holds.
    assert!(cluster.answer(cluster.remote(prompt(2, 30), 4)).await.failure.is_some());
    reach.gate.open();
    let Some(Message::Failure(failure)) = replies.next().await else { panic!("the copied blocks must not be confirmed") };
    assert_eq!(failure.instance_id, cluster.prefill.info.instance_id);
    cluster.idle().await;
    assert_eq!(cluster.answer(cluster.local(prompt(1, 60), 4)).await.cached_tokens(), Some(0));
}

#[tokio::test]
async fn clients_that_disconnect_at_any_moment_leak_nothing_and_break_no_communicator() {
    for reach in [shared(), linked()] {
        let sim = SimSettings { speedup: 20.0, ..Default::default() };
        let quick = Setup { sim, ..setup(&reach) };
        let cluster = Cluster::start(quick.clone(), quick).await;
        until_reached(&cluster, &reach, 100).await;
        let over_tcp = moved(&cluster.decode, "tcp");
        let requests = (0..60_u32).map(|number| {
            let cluster = &cluster;
            async move {
                let mut replies = cluster.open(cluster.remote(prompt(number % 7, 50 + number * 11), 40)).await;
                let patience = if number % 2 == 0 { number as usize / 4 } else { usize::MAX };
                let mut received = 0;
                while received < patience
                    && let Some(message) = replies.next().await
                {
                    assert!(!matches!(message, Message::Failure(_)), "{message:?}");
                    received += 1;
                }
            }
        });
        futures::future::join_all(requests).await;
        cluster.idle().await;
        assert_eq!(moved(&cluster.decode, "tcp"), over_tcp, "all blocks took the device path");
        assert_eq!(cluster.refused_live_writes(), 0.0, "late blocks of clients that left are not taken for an attack");
        reach.closed().await;
    }
}
