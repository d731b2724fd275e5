//! Tests of clients that disconnect: both workers must release all resources of the request.

use crate::harness::{Cluster, Setup, prompt};
use tandem_proto::v1::generate_reply::Message;

#[tokio::test]
async fn blocks_are_released_when_the_client_disconnects_during_a_queued_prefill() {
    let mut slow = Setup::slow();
    slow.engine.batch_max = 1;
    let cluster = Cluster::start(slow, Setup::default()).await;
    let first = cluster.open(cluster.remote(prompt(1, 10_000), 10)).await;
    cluster.prefill.until(|load| load.running_sequences == 1).await;
    let second = cluster.open(cluster.remote(prompt(2, 10_000), 10)).await;
    cluster.prefill.until(|load| load.waiting_requests == 1).await;
    drop(second);
    cluster.prefill.until(|load| load.waiting_requests == 0).await;
    assert_eq!(cluster.prefill.engine.load().running_sequences, 1, "the first request continues");
    drop(first);
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_are_released_when_the_client_disconnects_during_prefill_and_transfer() {
    let cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut replies = cluster.open(cluster.remote(prompt(1, 10_000), 10)).await;
    replies.scheduled().await;
    cluster.decode.until(|load| load.in_use_blocks == 625).await;
    drop(replies);
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_are_released_when_the_client_disconnects_while_decode_has_no_blocks() {
    let mut full = Setup::default();
    full.sim.capacity_blocks = 80;
    full.sim.speedup = 1.0;
    let cluster = Cluster::start(Setup::default(), full).await;
    let mut running = cluster.open(cluster.local(prompt(1, 1_000), 200)).await;
    running.scheduled().await;
    let mut waiting = cluster.open(cluster.remote(prompt(2, 1_000), 10)).await;
    waiting.scheduled().await;
    cluster.decode.until(|load| load.waiting_requests == 1).await;
    drop(waiting);
    cluster.prefill.idle().await;
    cluster.decode.until(|load| load.waiting_requests == 0).await;
    drop(running);
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_are_released_when_the_client_disconnects_during_generation() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    for request in [cluster.remote(prompt(1, 100), 30_000), cluster.local(prompt(2, 100), 30_000)] {
        let mut replies = cluster.open(request).await;
        replies.scheduled().await;
        replies.started().await;
        // If the prompt is remote, the next message may be the report of its chunks.
        let message = match replies.next().await {
            Some(Message::PrefillTimeline(_)) => replies.next().await,
            message => message,
        };
        assert!(matches!(message, Some(Message::Tokens(_))));
        assert!(cluster.decode.engine.load().in_use_blocks > 0);
        drop(replies);
        cluster.idle().await;
    }
}

#[tokio::test]
async fn many_cancelled_requests_do_not_affect_other_requests_on_the_same_connection() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let mut stays = cluster.open(cluster.local(prompt(1, 50), 3_000)).await;
    stays.scheduled().await;
    stays.started().await;
    for _ in 0..3 {
        // Half of the clients disconnect after they have received the first message, half of them right after they have sent the request.
        let opened = (0..100).map(|number| cluster.open(cluster.local(prompt(number, 50), 100)));
        let opened = futures::future::join_all(opened).await;
        let mut sent: Vec<_> = (0..100).map(|number| Box::pin(cluster.open(cluster.local(prompt(number, 50), 100)))).collect();
        futures::future::poll_fn(|context| {
            sent.iter_mut().for_each(|sent| drop(sent.as_mut().poll(context)));
            std::task::Poll::Ready(())
        })
        .await;
        tokio::task::yield_now().await;
        drop((opened, sent));
    }
    assert_eq!(stays.tokens().await.len(), 3_000);
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_are_released_whenever_clients_disconnect() {
    let setup = Setup { sim: tandem_devices::sim::SimSettings { speedup: 20.0, ..Default::default() }, ..Setup::default() };
    let cluster = Cluster::start(setup.clone(), setup).await;
    let requests = (0..60_u32).map(|number| {
        let cluster = &cluster;
        async move {
            let prompt = prompt(number % 7, 50 + number * 11);
            let request = if number % 3 == 0 { cluster.local(prompt, 40) } else { cluster.remote(prompt, 40) };
            let mut replies = cluster.open(request).await;
            // Every second client disconnects; client `n` does so after `n / 2` messages.
            let messages_max = if number % 2 == 0 { number as usize / 2 } else { usize::MAX };
            let mut received = 0;
            while received < messages_max && replies.next().await.is_some() {
                received += 1;
            }
        }
    });
    futures::future::join_all(requests).await;
    cluster.idle().await;
}
