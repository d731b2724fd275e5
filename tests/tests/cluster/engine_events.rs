//! Tests of the subscription to an engine's KV events over real sockets: replays, and the losses that it must report.

use anyhow::{Context, Result, bail};
use std::time::Duration;
use tandem_adapter::{
    BlocksRemoved, EngineEvent, EngineHash,
    kv_events::{EventLoss, MalformedBatch, MirrorUpdate, Subscription, SubscriptionSettings},
};
use tandem_kv::Tier;
use tandem_tests::fake_vllm::events::{Publisher, PublisherSettings};
use tokio::time::timeout;

/// Time limit of every wait. Only a failing test waits this long.
const TIMEOUT: Duration = Duration::from_secs(30);

struct Setup {
    publisher: Publisher,
    subscription: Subscription,
}

/// Returns the settings of a subscription that checks for lost batches every 50 ms.
fn settings(publisher: &PublisherSettings) -> SubscriptionSettings {
    SubscriptionSettings {
        endpoint: publisher.endpoint.clone(),
        replay_endpoint: Some(publisher.replay_endpoint.clone()),
        topic: publisher.topic.clone(),
        data_parallel_rank: publisher.data_parallel_rank,
        timeout: TIMEOUT,
        check_interval: Duration::from_millis(50),
    }
}

async fn start() -> Result<Setup> {
    start_with(|_| {}).await
}

/// Starts a publisher and a subscription, and waits until the publisher knows the subscription.
async fn start_with(change: impl FnOnce(&mut SubscriptionSettings)) -> Result<Setup> {
    follow(Publisher::bind().await?, change).await
}

async fn follow(mut publisher: Publisher, change: impl FnOnce(&mut SubscriptionSettings)) -> Result<Setup> {
    let mut settings = settings(publisher.endpoints());
    change(&mut settings);
    let subscription = Subscription::start(settings)?;
    publisher.subscribed(1).await?;
    Ok(Setup { publisher, subscription })
}

/// Returns a batch with one event, which is identified by this number.
fn batch(number: u64) -> Vec<EngineEvent> {
    let hashes = vec![EngineHash::Number(number)];
    vec![EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: Some(0) })]
}

impl Setup {
    async fn next(&mut self) -> Result<MirrorUpdate> {
        timeout(TIMEOUT, self.subscription.next()).await?.context("the task that receives the events has ended")
    }

    async fn publish(&self, batches: impl IntoIterator<Item = u64>) -> Result<()> {
        for number in batches {
            self.publisher.publish(batch(number)).await?;
        }
        Ok(())
    }

    async fn expect(&mut self, batches: impl IntoIterator<Item = u64>) -> Result<()> {
        for number in batches {
            assert_eq!(self.next().await?, MirrorUpdate::Batch(batch(number)));
        }
        Ok(())
    }
}

#[tokio::test]
async fn batches_published_before_and_after_the_subscription_arrive_once_in_order() -> Result<()> {
    let publisher = Publisher::bind().await?;
    for number in 0..3 {
        publisher.publish(batch(number)).await?;
    }
    let mut setup = follow(publisher, |_| {}).await?;
    setup.publish(3..200).await?;
    setup.expect(0..200).await
}

#[tokio::test]
async fn dropped_batches_are_replayed_when_the_next_batch_arrives() -> Result<()> {
    let mut setup = start_with(|settings| settings.check_interval = TIMEOUT).await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.drop_next(3).await?;
    setup.publish(1..6).await?;
    setup.expect(1..6).await
}

#[tokio::test]
async fn dropped_last_batches_are_replayed_although_no_batch_follows() -> Result<()> {
    let mut setup = start().await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.drop_next(2).await?;
    setup.publish([1, 2]).await?;
    setup.expect([1, 2]).await
}

#[tokio::test]
async fn gap_that_cannot_be_replayed_is_reported_and_later_batches_are_delivered() -> Result<()> {
    let mut setup = start_with(|settings| settings.check_interval = TIMEOUT).await?;
    setup.publish([0, 1]).await?;
    setup.expect([0, 1]).await?;
    setup.publisher.drop_next(3).await?;
    setup.publish([2, 3]).await?;
    setup.publisher.forget().await?;
    setup.publish([4, 5]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::Gap { next: 2, got: 4 }));
    setup.expect([4, 5]).await?;
    setup.publish([6]).await?;
    setup.expect([6]).await
}

#[tokio::test]
async fn batches_missing_from_replay_are_reported_and_the_other_batches_delivered() -> Result<()> {
    let publisher = Publisher::bind_with(PublisherSettings { buffer_batches: 2, ..PublisherSettings::default() }).await?;
    for number in 0..5 {
        publisher.publish(batch(number)).await?;
    }
    let mut setup = follow(publisher, |_| {}).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::History(3)));
    setup.expect([3, 4]).await
}

#[tokio::test]
async fn loss_before_a_batch_that_clears_the_cache_is_not_reported() -> Result<()> {
    let publisher = Publisher::bind_with(PublisherSettings { buffer_batches: 3, ..PublisherSettings::default() }).await?;
    for number in 0..4 {
        publisher.publish(batch(number)).await?;
    }
    let clear = |number| [batch(number), vec![EngineEvent::Cleared], batch(number + 1)].concat();
    publisher.publish(clear(4)).await?;
    let mut setup = follow(publisher, |settings| settings.check_interval = TIMEOUT).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Batch(clear(4)[1..].to_vec()));
    setup.publisher.drop_next(1).await?;
    setup.publish([6]).await?;
    setup.publisher.forget().await?;
    setup.publisher.publish(clear(7)).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Batch(clear(7)[1..].to_vec()));
    Ok(())
}

#[tokio::test]
async fn restarted_engine_is_detected_and_followed_from_its_first_batch() -> Result<()> {
    let mut setup = start().await?;
    setup.publish([0, 1]).await?;
    setup.expect([0, 1]).await?;
    // The new process publishes more batches than the old one, and may do so before the subscription reconnects.
    setup.publisher.restart().await?;
    setup.publish([10, 11, 12]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Restarted);
    setup.expect([10, 11, 12]).await
}

#[tokio::test]
async fn restarted_engine_is_detected_before_it_publishes() -> Result<()> {
    let mut setup = start().await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.restart().await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Restarted);
    Ok(())
}

#[tokio::test]
async fn lost_connection_loses_no_batch() -> Result<()> {
    let mut setup = start().await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.disconnect().await?;
    setup.publish([1, 2]).await?;
    setup.expect([1, 2]).await
}

#[tokio::test]
async fn gap_and_lost_connection_are_reported_without_a_replay_endpoint() -> Result<()> {
    let mut setup = start_with(|settings| settings.replay_endpoint = None).await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.drop_next(1).await?;
    setup.publish([1, 2]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::Gap { next: 1, got: 2 }));
    setup.expect([2]).await?;
    setup.publisher.disconnect().await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::Disconnected));
    setup.publisher.subscribed(2).await?;
    setup.publish([3]).await?;
    setup.expect([3]).await
}

#[tokio::test]
async fn gap_is_reported_if_the_replay_is_not_answered() -> Result<()> {
    let mut setup = start_with(|settings| settings.timeout = Duration::from_millis(200)).await?;
    setup.publish([0]).await?;
    setup.expect([0]).await?;
    setup.publisher.answer_replays(false).await?;
    setup.publisher.drop_next(1).await?;
    setup.publish([1, 2]).await?;
    // The loss that is detected first depends on timing. It is the gap, or that the request for a replay is not answered.
    match setup.next().await? {
        MirrorUpdate::Lost(EventLoss::Gap { next: 1, got: 2 } | EventLoss::Disconnected) => {}
        other => bail!("{other:?}"),
    }
    setup.publisher.answer_replays(true).await?;
    setup.publish([3]).await?;
    loop {
        match setup.next().await? {
            MirrorUpdate::Batch(events) if events == batch(3) => return Ok(()),
            MirrorUpdate::Batch(_) | MirrorUpdate::Lost(EventLoss::Disconnected) => {}
            other => bail!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn malformed_payload_is_reported_as_a_loss() -> Result<()> {
    let mut setup = start().await?;
    setup.publish([0]).await?;
    setup.publisher.publish_bytes(b"\xc1".to_vec()).await?;
    setup.publish([2]).await?;
    setup.expect([0]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::Malformed(MalformedBatch::NotABatch)));
    setup.expect([2]).await
}

#[tokio::test]
async fn batch_of_another_rank_is_reported_as_a_loss() -> Result<()> {
    let mut setup = start_with(|settings| settings.data_parallel_rank = 1).await?;
    setup.publish([0]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::OtherRank(0)));
    Ok(())
}

#[tokio::test]
async fn batches_of_other_topics_are_not_delivered() -> Result<()> {
    let mut setup = start_with(|settings| {
        // The subscription is to the topic `k`, but ZMQ delivers all topics that begin with `k`, such as the publisher's topic `kv`.
        settings.topic = "k".to_owned();
        settings.replay_endpoint = None;
    })
    .await?;
    setup.publish([0, 1]).await?;
    setup.publisher.set_topic("k").await?;
    setup.publish([2]).await?;
    assert_eq!(setup.next().await?, MirrorUpdate::Lost(EventLoss::History(2)));
    setup.expect([2]).await
}

#[tokio::test]
async fn subscription_may_start_before_the_engine() -> Result<()> {
    let publisher = Publisher::bind().await?;
    let settings = publisher.endpoints().clone();
    drop(publisher);
    let mut subscription = Subscription::start(self::settings(&settings))?;
    let publisher = loop {
        // The port becomes free only when the publisher's task has ended, so binding is retried until then.
        match Publisher::bind_with(settings.clone()).await {
            Ok(publisher) => break publisher,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    publisher.publish(batch(0)).await?;
    assert_eq!(timeout(TIMEOUT, subscription.next()).await?, Some(MirrorUpdate::Batch(batch(0))));
    Ok(())
}

#[tokio::test]
async fn events_over_unix_sockets_are_delivered_and_replayed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| format!("ipc://{}", folder.path().join(name).display());
    let settings =
        PublisherSettings { endpoint: path("events"), replay_endpoint: path("replay"), ..PublisherSettings::default() };
    let mut setup = follow(Publisher::bind_with(settings).await?, |_| {}).await?;
    setup.publisher.drop_next(1).await?;
    setup.publish([0, 1]).await?;
    setup.expect([0, 1]).await
}

#[tokio::test]
async fn subscription_that_is_not_read_loses_no_batch() -> Result<()> {
    let mut setup = start().await?;
    // The subscription cannot buffer this many batches.
    setup.publish(0..500).await?;
    setup.expect(0..500).await
}
