//! Tests of an attacker on the cluster's network that writes forged KV into the decode worker's memory. Neither a guessed nor a stolen
//! ticket may change an answer, and forged blocks must never be cached.

use crate::{
    harness::{BLOCK_BYTES, Cluster, Setup, Worker, channel, prompt},
    relay::{TicketRelay, write},
};
use serde_json::json;
use std::time::Duration;
use tandem_frontend::FrontendSettings;
use tandem_proto::v1::{FailureReason, GenerateRequest, WorkerRef, generate_reply::Message};
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_tests::{Client, Endpoint, services::Services};
use tandem_text::ServedModel;

const PROMPT: u32 = 300;
const BLOCKS: u32 = 19;

fn garbage() -> Vec<u8> {
    vec![0xAA; BLOCK_BYTES as usize]
}

impl Cluster {
    /// Returns a request whose prompt is prefilled through the relay.
    fn through(&self, relay: &TicketRelay, prompt: Vec<u32>) -> GenerateRequest {
        let prefill = WorkerRef { address: relay.address.clone(), ..self.prefill.reference() };
        let cache_namespace = b"a secret salt of its own".to_vec();
        GenerateRequest { prefill: Some(prefill), cache_namespace, ..self.local(prompt, 24) }
    }

    fn refused_writes(&self, reason: &str) -> f64 {
        self.decode.metric(&format!(r#"tandem_worker_refused_writes_total{{worker="decode-0",reason="{reason}"}}"#))
    }

    pub fn refused_live_writes(&self) -> f64 {
        ["not_missing", "wrong_size", "wrong_path"].map(|reason| self.refused_writes(reason)).iter().sum()
    }
}

async fn answer_alone(request: &GenerateRequest) -> Vec<u32> {
    let alone = Cluster::start(Setup::default(), Setup::default()).await;
    let local = GenerateRequest { prefill: None, instance_id: alone.decode.info.instance_id.clone(), ..request.clone() };
    alone.answer(local).await.tokens[&0].clone()
}

/// Returns the ticket that would follow `ticket` if tickets were numbers of a counter, mixed twice with the finaliser of SplitMix64. An
/// attacker could compute this, because the finaliser is invertible.
fn successor(ticket: u64) -> u64 {
    const ODD: [u64; 2] = [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB];
    const WORD: u64 = 0x7469_636b_6574;
    let shifted = |value: u64, bits: u32| (0..64 / bits).fold(value, |whole, _| value ^ (whole >> bits));
    let inverse = |odd: u64| (0..6).fold(odd, |inverse, _| inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse))));
    let mix = |value: u64| {
        let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let value = (value ^ (value >> 30)).wrapping_mul(ODD[0]);
        let value = (value ^ (value >> 27)).wrapping_mul(ODD[1]);
        value ^ (value >> 31)
    };
    let unmix = |value: u64| {
        let value = shifted(value, 31).wrapping_mul(inverse(ODD[1]));
        let value = shifted(value, 27).wrapping_mul(inverse(ODD[0]));
        shifted(value, 30).wrapping_sub(0x9E37_79B9_7F4A_7C15)
    };
    mix(mix(unmix(unmix(ticket) ^ WORD).wrapping_add(1)) ^ WORD)
}

/// Returns the tickets that an attacker would guess after it has read some.
fn guesses(seen: &[[u8; 16]]) -> Vec<[u8; 16]> {
    let last = *seen.last().expect("a ticket was read");
    let number = u128::from_le_bytes(last);
    let mut guesses = vec![[0; 16], [0xff; 16], number.wrapping_add(1).to_le_bytes(), last];
    guesses.push(u128::from_be_bytes(last).wrapping_add(1).to_be_bytes());
    let [first, second] = [seen[0], last].map(u128::from_le_bytes);
    guesses.push(second.wrapping_add(second.wrapping_sub(first)).to_le_bytes());
    let [mut low, high] = [number as u64, (number >> 64) as u64];
    for _ in 0..8 {
        low = successor(low);
        guesses.push((u128::from(high) << 64 | u128::from(low)).to_le_bytes());
        guesses.push((u128::from(successor(high)) << 64 | u128::from(low)).to_le_bytes());
    }
    guesses
}

#[tokio::test]
async fn guessed_ticket_writes_no_block() {
    let cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut attacker = TicketRelay::start(channel(&cluster.prefill.address).await).await;
    // A client of the decode worker's gRPC service may name any prefill worker. The attacker names its own server, which receives tickets.
    let mut seen = Vec::new();
    for number in 0..3 {
        let own = cluster.open(cluster.through(&attacker, prompt(100 + number, 40))).await;
        seen.push(attacker.ticket().await.secret());
        drop(own);
    }
    let request = GenerateRequest { cache_namespace: b"a secret salt".to_vec(), ..cluster.remote(prompt(1, PROMPT), 24) };
    let mut victim = cluster.open(request.clone()).await;
    victim.scheduled().await;
    cluster.decode.until(|load| load.running_sequences == 1).await;
    let mut written = 0;
    for guess in guesses(&seen) {
        for index in 0..BLOCKS {
            written += u32::from(write(&cluster.decode.address, guess, &[index], garbage()).await.is_ok());
        }
    }
    assert_eq!(written, 0, "no block of the attacker is written");
    assert_eq!(victim.tokens().await, answer_alone(&request).await);
    assert!(cluster.refused_writes("unknown_ticket") > 0.0 && cluster.refused_writes("spent_ticket") > 0.0);
    assert_eq!(cluster.refused_live_writes(), 0.0, "no reservation has ended because of the attack");
    cluster.idle().await;
}

#[tokio::test]
async fn forged_push_ends_reservation_and_is_never_cached() {
    for forged in [0..BLOCKS, 0..1, BLOCKS - 1..BLOCKS] {
        let cluster = Cluster::start(Setup::default(), Setup::default()).await;
        let mut relay = TicketRelay::start(channel(&cluster.prefill.address).await).await;
        let request = cluster.through(&relay, prompt(1, PROMPT));
        let mut victim = cluster.open(request.clone()).await;
        victim.scheduled().await;
        let seen = relay.ticket().await;
        let indices: Vec<u32> = forged.clone().collect();
        write(&cluster.decode.address, seen.secret(), &indices, garbage()).await.expect("the ticket belongs to the victim");
        drop(seen);
        // The genuine blocks arrive after the forged blocks were written in their place.
        let Some(Message::Failure(failure)) = victim.next().await else { panic!("forged blocks must not be confirmed") };
        assert_eq!((failure.reason(), &failure.instance_id), (FailureReason::WriteRefused, &cluster.prefill.info.instance_id));
        assert_eq!((cluster.refused_writes("not_missing"), cluster.refused_live_writes()), (1.0, 1.0));
        cluster.idle().await;
        let again = cluster.answer(GenerateRequest { attempt: 2, prefill: None, ..request.clone() }).await;
        assert_eq!((again.cached_tokens(), &again.tokens[&0]), (Some(0), &answer_alone(&request).await), "{forged:?}");
        cluster.idle().await;
    }
}

#[tokio::test]
async fn forged_blocks_are_dropped_without_confirmation() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let mut relay = TicketRelay::start(channel(&cluster.prefill.address).await).await;
    let request = cluster.through(&relay, prompt(1, PROMPT));
    let mut victim = cluster.open(request.clone()).await;
    victim.scheduled().await;
    let seen = relay.ticket().await;
    let all: Vec<u32> = (0..BLOCKS).collect();
    write(&cluster.decode.address, seen.secret(), &all, garbage()).await.expect("the ticket belongs to the victim");
    // All blocks are written, but the generation does not start, because the prefill worker has not confirmed them.
    assert_eq!(cluster.decode.engine.load().running_sequences, 1);
    let same_prompt = cluster.answer(GenerateRequest { prefill: None, samples: 2, ..request.clone() });
    let leaving = async {
        cluster.decode.until(|load| load.waiting_requests == 1).await;
        drop(victim);
    };
    let (same_prompt, ()) = tokio::join!(same_prompt, leaving);
    assert_eq!((same_prompt.cached_tokens(), &same_prompt.tokens[&0]), (Some(0), &answer_alone(&request).await));
    drop(seen);
    cluster.idle().await;
    assert_eq!(cluster.refused_live_writes(), 0.0, "late genuine blocks do not count as an attack");
}

#[tokio::test]
async fn write_of_an_unexpected_block_or_size_ends_the_reservation() {
    for (index, payload, reason) in [(0, vec![0; 64], "wrong_size"), (BLOCKS, garbage(), "not_missing")] {
        let cluster = Cluster::start(Setup::default(), Setup::default()).await;
        let mut relay = TicketRelay::start(channel(&cluster.prefill.address).await).await;
        let mut victim = cluster.open(cluster.through(&relay, prompt(1, PROMPT))).await;
        victim.scheduled().await;
        let seen = relay.ticket().await;
        assert!(seen.write(index, payload).await.is_err());
        let Some(Message::Failure(failure)) = victim.next().await else {
            panic!("the reservation must end, because another process uses its ticket")
        };
        assert_eq!((failure.reason(), cluster.refused_writes(reason)), (FailureReason::WriteRefused, 1.0));
        drop(seen);
        cluster.idle().await;
    }
}

/// The attacker reads the traffic of all prefill workers. The client must receive the correct answer.
#[tokio::test]
async fn attempt_with_forged_blocks_is_retried_with_a_correct_answer() {
    for prefill_workers in [1, 2] {
        attempt_with_forged_blocks(prefill_workers).await;
    }
}

/// Attacks a whole cluster that prefills remotely, with one prefill worker or two.
async fn attempt_with_forged_blocks(prefill_workers: usize) {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let second = Worker::prefill(&Setup { number: 1, ..Setup::default() }).await;
    let mut one = TicketRelay::start(channel(&cluster.prefill.address).await).await;
    let mut other = TicketRelay::start(channel(&second.address).await).await;
    let prefill = [&one.address, &other.address].into_iter().take(prefill_workers);
    let workers = prefill.chain([&cluster.decode.address]).cloned().collect();
    let services = Services::default();
    let settings = RouterSettings { workers, prefill: PrefillPlace::Remote, ..Default::default() };
    let router = services.router(settings).await.expect("a port is free").to_string();
    let settings = FrontendSettings { block_size: 16, ..FrontendSettings::new(router, ServedModel::sim("sim")) };
    let frontend = services.frontend(settings).await.expect("a port is free");
    let client = Client::new(frontend);
    services.ready(prefill_workers + 1, &client).await.expect("all workers join in time");
    let complete = async |salt: &str| {
        let body = json!({ "model": "sim", "prompt": prompt(1, PROMPT), "max_tokens": 24, "seed": 7, "cache_salt": salt });
        client.answer(Endpoint::Completions.path(), &body).await.expect("the request is answered")
    };
    let mut ticket = async || {
        tokio::select! {
            seen = one.ticket() => seen,
            seen = other.ticket() => seen,
        }
    };
    let attacking = async {
        let seen = ticket().await;
        let all: Vec<u32> = (0..BLOCKS).collect();
        write(&cluster.decode.address, seen.secret(), &all, garbage()).await.expect("the ticket belongs to the victim");
        drop(seen);
        drop(ticket().await);
    };
    let (answer, ()) = tokio::join!(complete("the victim's"), attacking);
    assert_eq!((answer.status, cluster.refused_writes("not_missing")), (200, 1.0));
    // The answer must be the same without an attack, with the victim's salt and with another one.
    for salt in ["the victim's", "another"] {
        let (again, ()) = tokio::join!(complete(salt), async { drop(ticket().await) });
        assert_eq!(again.text(0), answer.text(0), "salt {salt}");
    }
    services.shutdown.run(Duration::ZERO).await;
}
