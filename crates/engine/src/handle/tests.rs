mod constrained;
mod devices;
mod fairness;

use super::*;
use crate::sim::{SimEngine, SimSettings};
use crate::{EngineError, Sampling, StepOutput};
use tandem_kv::{BlockId, Change, HashKey, Namespace, Priority};

const SETTINGS: EngineSettings = EngineSettings {
    chunk_budget: 64,
    itl_max: None,
    batch_max: 16,
    queue_max: 64,
    prefix_caching: true,
    hash_key: HashKey::NONE,
    max_buffered_events: 1_024,
    step_max: Duration::from_secs(60),
};

fn start() -> EngineHandle {
    start_with(SimEngine::new(SimSettings::default()), SETTINGS)
}

fn start_device(device: impl Engine) -> EngineHandle {
    spawn(EngineHandle::simulated(Box::new(device), SimClock::default(), SETTINGS, 7))
}

fn start_with(engine: SimEngine, settings: EngineSettings) -> EngineHandle {
    let clock = engine.clock();
    spawn(EngineHandle::simulated(Box::new(engine), clock, settings, 7))
}

#[expect(clippy::disallowed_methods, reason = "the test's runtime ends it")]
fn spawn((handle, running): (EngineHandle, impl Future<Output = ()> + Send + 'static)) -> EngineHandle {
    tokio::spawn(running);
    handle
}

pub(super) fn generate(max_tokens: u32) -> Generate {
    Generate {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: Namespace::new("sim", "", "", ""),
        prompt: (0..100).collect(),
        sampling: Sampling { max_tokens: Some(max_tokens), ..Sampling::default() },
        samples: 1,
        kv: crate::KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_job_releases_its_blocks() {
    let engine = start();
    let mut job = engine.generate(generate(10_000)).await.expect("the job fits in the cache");
    while !matches!(job.next().await, Some(Event::Token { .. })) {}
    assert!(engine.load().in_use_blocks > 0);
    drop(job);
    engine.wait_for_load(|load| load.in_use_blocks == 0 && load.running_sequences == 0).await;
}

#[tokio::test(start_paused = true)]
async fn submission_dropped_before_it_resolves_releases_its_blocks() {
    let engine = start();
    let mut submitting = Box::pin(engine.generate(Generate { kv: crate::KvSource::Remote, ..generate(10) }));
    // The first poll submits the job. The future is dropped later, after the engine has answered.
    std::future::poll_fn(|context| std::task::Poll::Ready(submitting.as_mut().poll(context).is_pending())).await;
    engine.wait_for_load(|load| load.in_use_blocks > 0).await;
    drop(submitting);
    let idle = engine.wait_for_load(|load| load.in_use_blocks == 0 && load.waiting_requests == 0);
    tokio::time::timeout(Duration::from_secs(60), idle).await.expect("the blocks are released");
}

#[tokio::test(start_paused = true)]
async fn event_stream_ends_after_the_last_sample_has_finished() {
    let engine = start();
    let mut job = engine.generate(generate(3)).await.expect("the job fits in the cache");
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Finished { .. })), "{last:?}");
}

/// The events of one job, which has two samples, are not read. The events of the other job are read.
#[tokio::test(start_paused = true)]
async fn job_is_paused_while_its_events_are_not_read() {
    const BUFFERED_MAX: usize = 10;
    let engine = start_with(SimEngine::new(SimSettings::default()), EngineSettings { max_buffered_events: 10, ..SETTINGS });
    let two = || Generate { samples: 2, ..generate(200) };
    let mut expected = Vec::new();
    let mut job = start().generate(two()).await.expect("the job fits in the cache");
    while let Some(event) = job.next().await {
        expected.push(format!("{event:?}"));
    }
    let mut unread = engine.generate(two()).await.expect("the job fits in the cache");
    let mut read = engine.generate(generate(200)).await.expect("the job fits in the cache");
    while read.next().await.is_some() {}
    tokio::time::sleep(Duration::from_secs(1_800)).await;
    assert!((BUFFERED_MAX..BUFFERED_MAX + 3).contains(&unread.events.len()), "{} events are buffered", unread.events.len());
    let mut received = Vec::new();
    while let Some(event) = tokio::time::timeout(Duration::from_secs(60), unread.next()).await.expect("the job resumes in time") {
        received.push(format!("{event:?}"));
    }
    assert_eq!(
        (received.len(), &received[1..]),
        (expected.len(), &expected[1..]),
        "all events except the count of cached tokens are equal"
    );

    let unread = engine.generate(two()).await.expect("the job fits in the cache");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(engine.load().in_use_blocks > 0);
    drop(unread);
    engine.wait_for_load(|load| load.in_use_blocks == 0 && load.running_sequences == 0).await;
}

#[tokio::test(start_paused = true)]
async fn paused_job_receives_an_engine_failure() {
    let sim = SimEngine::new(SimSettings::default());
    let clock = sim.clock();
    let settings = EngineSettings { max_buffered_events: 1, ..SETTINGS };
    let engine = spawn(EngineHandle::simulated(Box::new(Failing(sim)), clock, settings, 7));
    let fine = Generate { prompt: vec![1, 2], samples: 3, ..generate(50) };
    let mut unread = engine.generate(fine).await.expect("the job fits in the cache");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut fails = engine.generate(generate(3)).await.expect("the job fits in the cache");
    while fails.next().await.is_some() {}
    let mut last = None;
    while let Some(event) = unread.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
}

#[tokio::test(start_paused = true)]
async fn prefill_is_computed_completely_although_its_events_are_not_read() {
    let engine = start_with(SimEngine::new(SimSettings::default()), EngineSettings { max_buffered_events: 1, ..SETTINGS });
    let Generate { request_id, account, priority, namespace, .. } = generate(1);
    let prompt = (0..1_000).map(|position| position % 250).collect();
    let mut job = engine
        .prefill(Prefill { request_id, account, priority, namespace, prompt, first_token: None })
        .await
        .expect("the job fits in the cache");
    job.send_blocks((0..63).collect(), BlockAccess::Copied).await;
    engine.wait_for_load(|load| load.pending_prefill_tokens == 0 && load.in_use_blocks == 63).await;
    let mut blocks = 0;
    while let Some(event) = job.next().await {
        match event {
            Event::BlocksReady(ready) => blocks += ready.len(),
            Event::Computed(_) => break,
            _ => {}
        }
    }
    assert_eq!(blocks, 63);
}

#[tokio::test(start_paused = true)]
async fn cache_subscriber_receives_every_change_once() {
    let engine = start();
    let (empty, mut first) = engine.watch().await.expect("the engine thread runs");
    assert_eq!((empty.at_event_id, empty.stored.len()), (0, 0));
    let mut job = engine.generate(generate(40)).await.expect("the job fits in the cache");
    while job.next().await.is_some() {}
    let (snapshot, _second) = engine.watch().await.expect("the engine thread runs");
    let (mut ids, mut hashes, mut included_request_ids) = (Vec::new(), Vec::new(), Vec::new());
    while let Ok(batch) = first.try_recv() {
        included_request_ids.extend(batch.included_request_ids.clone());
        for event in &batch.events {
            ids.push(event.event_id);
            if let Change::Stored(chain) = &event.change {
                hashes.extend(chain.sequence_hashes.clone());
            }
        }
    }
    assert_eq!(included_request_ids, ["request"]);
    assert_eq!(ids, (1..=snapshot.at_event_id).collect::<Vec<_>>());
    let stored: Vec<_> = snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect();
    assert_eq!(stored, hashes);
}

#[tokio::test(start_paused = true)]
async fn hung_future_resolves_only_while_a_step_exceeds_the_time_limit() {
    let sim = SimSettings { prefill_overhead: Duration::from_secs(300), ..SimSettings::default() };
    let engine = start_with(SimEngine::new(sim), EngineSettings { step_max: Duration::from_secs(20), ..SETTINGS });
    let hangs = async |seconds| tokio::time::timeout(Duration::from_secs(seconds), engine.hung()).await.is_ok();
    assert!(!hangs(3_600).await, "an idle engine does not hang");
    let mut short = engine.generate(Generate { prompt: vec![1], ..generate(60_000) }).await.expect("the job fits in the cache");
    assert!(matches!(short.next().await, Some(Event::Scheduled { .. })));
    assert!(!hangs(3_600).await, "the engine makes steps until backpressure pauses its only job");
    let reading = async {
        while short.next().await.is_some() {}
        std::future::pending::<()>().await
    };
    let story = async {
        assert!(!hangs(60).await, "the engine makes steps");
        let _long = engine.generate(generate(3)).await.expect("the job fits in the cache");
        let began = Instant::now();
        engine.hung().await;
        let noticed = began.elapsed();
        assert!((19..=21).contains(&noticed.as_secs()), "{noticed:?}");
        assert!(hangs(0).await, "the step still runs");
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!hangs(60).await, "the engine makes steps again");
    };
    tokio::select! {
        () = reading => unreachable!("the reading task never ends"),
        () = story => {}
    }
}

struct Failing(SimEngine);

impl Engine for Failing {
    fn describe(&self) -> EngineInfo {
        self.0.describe()
    }
    fn step(&mut self, chunks: &[crate::Chunk<'_>]) -> Result<StepOutput, crate::EngineError> {
        match chunks.iter().any(|chunk| chunk.tokens.contains(&99)) {
            true => Err(crate::EngineError::Step("the test's device fails".into())),
            false => self.0.step(chunks),
        }
    }
    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        self.0.read_block(block, into)
    }
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        self.0.write_block(block, bytes)
    }
}

#[tokio::test(start_paused = true)]
async fn failed_step_fails_all_jobs_and_later_jobs_run() {
    let engine = start_device(Failing(SimEngine::new(SimSettings::default())));
    let mut job = engine.generate(generate(3)).await.expect("the job fits in the cache");
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    let mut job = engine.generate(Generate { prompt: vec![1, 2], ..generate(3) }).await.expect("the job fits in the cache");
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Finished { .. })), "{last:?}");
}

#[test]
fn engine_starts_outside_of_a_tokio_runtime() {
    let engine =
        EngineHandle::start(Box::new(SimEngine::new(SimSettings { speedup: 1_000.0, ..SimSettings::default() })), SETTINGS);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("the runtime can be built");
    let events = runtime.block_on(async {
        let mut job = engine.generate(generate(3)).await.expect("the job fits in the cache");
        let mut events = 0;
        while job.next().await.is_some() {
            events += 1;
        }
        events
    });
    assert_eq!(events, 6);
}
