//! Tests of clients that compete for one engine, in simulated time.

use super::*;

/// The settings of `tandem up --engine sim`.
const WORKER: EngineSettings = EngineSettings { chunk_budget: 512, batch_max: 256, queue_max: 1_024, ..SETTINGS };

fn question(number: u32, account: &str) -> Generate {
    let prompt = (0..1_000).map(|position| (number * 31 + position * 7) % 250).collect();
    Generate { account: account.to_owned(), prompt, ..generate(3) }
}

async fn first_token(engine: &EngineHandle, question: Generate) -> Duration {
    let asked = Instant::now();
    let mut job = engine.generate(question).await.expect("the job fits in the cache");
    while !matches!(job.next().await.expect("the engine answers the job"), Event::Token { .. }) {}
    asked.elapsed()
}

#[tokio::test(start_paused = true)]
async fn requests_of_128_samples_delay_another_request_by_only_a_few_steps() {
    let engine = start_with(SimEngine::new(SimSettings::default()), WORKER);
    let quiet = first_token(&engine, question(0, "")).await;
    let mut hostile = tokio::task::JoinSet::new();
    for number in 1..4 {
        let mut many = question(number, "");
        many.samples = 128;
        (many.sampling.min_tokens, many.sampling.max_tokens) = (400, Some(400));
        let mut job = engine.generate(many).await.expect("the job fits in the cache");
        hostile.spawn(async move {
            let mut tokens = 0;
            while let Some(event) = job.next().await {
                tokens += usize::from(matches!(event, Event::Token { .. }));
            }
            tokens
        });
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    for number in 4..24 {
        for account in ["", "another"] {
            let delayed = first_token(&engine, question(number * 2 + account.len() as u32 % 2, account)).await;
            // The question first waits for the current step. The steps of its prompt and of its first token also continue a full batch (31.6 ms each)
            // and compute tokens of preempted samples again (up to 30 ms each).
            assert!(delayed <= 6 * quiet, "question {number} of '{account}': {delayed:?}, {quiet:?} alone");
        }
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    assert!(engine.load().preemptions > 0, "the cache has too few blocks for all samples");
    for tokens in hostile.join_all().await {
        assert_eq!(tokens, 128 * 400, "all samples are answered");
    }
    engine.wait_for_load(|load| load.in_use_blocks == 0 && load.running_sequences == 0).await;
}
