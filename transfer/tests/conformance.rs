//! What every transport must do, run for each of them.

use bytes::Bytes;
use futures::FutureExt;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_transfer::{Loopback, Push, Refused, Sink, Tcp, TransferError, TransferService, Transport};
use tokio::sync::Semaphore;

const TICKET: u64 = 0xdead_beef_0000_0007;
const BLOCK_BYTES: usize = 256 << 10;
/// Time in which something that is not held up would have happened.
const PENDING: Duration = Duration::from_millis(300);
/// Time in which everything happens on the slowest machine.
const SOON: Duration = Duration::from_secs(30);

/// The receiver's memory, with the rules a worker has: a ticket names its missing blocks, each is written once and whole.
#[derive(Clone)]
struct Memory(Arc<State>);

struct State {
    tickets: Mutex<BTreeMap<u64, BTreeMap<u32, Option<Bytes>>>>,
    /// One permit lets one write happen.
    allowed: Semaphore,
    /// One permit for each write that has come.
    asked: Semaphore,
}

impl Memory {
    fn new() -> Self {
        Self(Arc::new(State {
            tickets: Mutex::default(),
            allowed: Semaphore::new(Semaphore::MAX_PERMITS),
            asked: Semaphore::new(0),
        }))
    }

    fn give_out(&self, ticket: u64, missing: impl IntoIterator<Item = u32>) {
        let missing = missing.into_iter().map(|index| (index, None)).collect();
        self.0.tickets.lock().expect("not poisoned").insert(ticket, missing);
    }

    /// Takes the ticket back; gives what had landed.
    fn revoke(&self, ticket: u64) -> BTreeMap<u32, Bytes> {
        let blocks = self.0.tickets.lock().expect("not poisoned").remove(&ticket).expect("it was given out");
        blocks.into_iter().filter_map(|(index, block)| Some((index, block?))).collect()
    }

    /// From now on writes wait for [`Memory::release`].
    fn hold(&self) {
        self.0.allowed.forget_permits(usize::MAX);
    }

    fn release(&self, writes: usize) {
        self.0.allowed.add_permits(writes);
    }

    fn sink(&self) -> Sink {
        let memory = self.clone();
        Sink::new(move |ticket, index, payload: Bytes| {
            let memory = memory.clone();
            async move {
                memory.0.asked.add_permits(1);
                memory.0.allowed.acquire().await.expect("open").forget();
                let mut tickets = memory.0.tickets.lock().expect("not poisoned");
                let block = tickets.get_mut(&ticket).and_then(|missing| missing.get_mut(&index)).ok_or(Refused)?;
                if block.is_some() || payload.len() != BLOCK_BYTES {
                    return Err(Refused);
                }
                *block = Some(payload);
                Ok(())
            }
        })
    }
}

/// A transport and a receiver that it reaches.
struct Rig {
    transport: Box<dyn Transport>,
    address: String,
    memory: Memory,
    disconnect: Box<dyn FnOnce() + Send>,
}

impl Rig {
    fn open(&self, ticket: u64) -> Push {
        self.transport.open(&self.address, ticket).expect("the address is valid")
    }

    /// Sends one block and waits until it has landed.
    async fn send(&self, ticket: u64, index: u32, payload: Bytes) -> Result<(), TransferError> {
        let mut push = self.open(ticket);
        push.send(index, payload).await?;
        push.finish().await
    }
}

fn loopback() -> Rig {
    let (transport, memory) = (Loopback::default(), Memory::new());
    let address = "decode-0".to_owned();
    let reachable = transport.add(&address, memory.sink());
    Rig { transport: Box::new(transport), address, memory, disconnect: Box::new(move || drop(reachable)) }
}

fn tcp() -> Rig {
    let memory = Memory::new();
    // A runtime of its own: shut down, it closes every connection, as a process that dies does.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("bound").to_string();
    let service = TransferService::server(memory.sink());
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a runtime");
        let incoming = tandem_proto::link::incoming(listener);
        tandem_proto::link::server().add_service(service).serve_with_incoming(incoming).await.expect("it serves");
    });
    let runtime = RuntimeGuard(Some(runtime));
    Rig { transport: Box::new(Tcp::default()), address, memory, disconnect: Box::new(move || drop(runtime)) }
}

struct RuntimeGuard(Option<tokio::runtime::Runtime>);

impl Drop for RuntimeGuard {
    fn drop(&mut self) {
        self.0.take().expect("dropped once").shutdown_background();
    }
}

fn block(index: u32) -> Bytes {
    let mut state = u64::from(index) * 2 + 1;
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    while bytes.len() < BLOCK_BYTES {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend((state >> 11).to_le_bytes());
    }
    bytes.into()
}

async fn all_blocks_land_bit_equal_in_any_order(rig: Rig) {
    for (ticket, order) in [(1, [0, 1, 2, 3, 4, 5]), (2, [5, 4, 3, 2, 1, 0]), (3, [3, 0, 5, 1, 4, 2])] {
        // Only every third of the prompt's blocks is missing.
        rig.memory.give_out(ticket, order.map(|index| index * 3));
        let mut push = rig.open(ticket);
        for index in order {
            push.send(index * 3, block(index)).await.expect("it is missing");
        }
        push.finish().await.expect("all are missing");
        let landed = rig.memory.revoke(ticket);
        assert_eq!(landed.len(), order.len());
        for index in order {
            assert!(landed[&(index * 3)] == block(index), "block {index} is another");
        }
    }
}

async fn two_pushes_share_a_ticket_without_mixing(rig: Rig) {
    rig.memory.give_out(TICKET, 0..8);
    let (mut even, mut odd) = (rig.open(TICKET), rig.open(TICKET));
    for index in (0..8).step_by(2) {
        even.send(index, block(index)).await.expect("it is missing");
        odd.send(index + 1, block(index + 1)).await.expect("it is missing");
    }
    even.finish().await.expect("all are missing");
    odd.finish().await.expect("all are missing");
    assert!(rig.memory.revoke(TICKET).iter().all(|(index, payload)| *payload == block(*index)));
}

async fn nothing_to_send_is_fine(rig: Rig) {
    rig.memory.give_out(TICKET, []);
    rig.open(TICKET).finish().await.expect("nothing can be refused");
}

async fn a_wrong_ticket_is_refused(rig: Rig) {
    rig.memory.give_out(TICKET, 0..4);
    for wrong in [0, TICKET ^ 1, u64::MAX] {
        assert!(matches!(rig.send(wrong, 0, block(0)).await, Err(TransferError::Refused(_))));
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn a_block_that_is_not_missing_is_refused(rig: Rig) {
    rig.memory.give_out(TICKET, 2..4);
    for held in [0, 1, 4, u32::MAX] {
        assert!(matches!(rig.send(TICKET, held, block(held)).await, Err(TransferError::Refused(_))));
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn the_same_block_twice_is_refused(rig: Rig) {
    rig.memory.give_out(TICKET, 0..2);
    rig.send(TICKET, 0, block(0)).await.expect("it is missing");
    assert!(matches!(rig.send(TICKET, 0, block(1)).await, Err(TransferError::Refused(_))));
    let mut push = rig.open(TICKET);
    push.send(1, block(1)).await.expect("it is missing");
    let second = async {
        push.send(1, block(1)).await?;
        push.finish().await
    };
    assert!(matches!(second.await, Err(TransferError::Refused(_))));
    let landed = rig.memory.revoke(TICKET);
    assert!(landed[&0] == block(0) && landed[&1] == block(1), "the first write stands");
}

async fn a_short_or_long_block_is_refused(rig: Rig) {
    rig.memory.give_out(TICKET, 0..2);
    for bytes in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES] {
        assert!(matches!(rig.send(TICKET, 0, vec![7; bytes].into()).await, Err(TransferError::Refused(_))), "{bytes}");
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn a_refusal_in_the_middle_ends_the_push(rig: Rig) {
    rig.memory.give_out(TICKET, 0..3);
    let mut push = rig.open(TICKET);
    for index in 0..3 {
        push.send(index, block(index)).await.expect("it is missing");
    }
    // These are not missing; the refusal arrives while more is sent.
    let sending = async {
        for index in 3..200 {
            push.send(index, block(0)).await?;
        }
        push.finish().await
    };
    let error = sending.await.expect_err("nobody takes them");
    assert!(matches!(error, TransferError::Refused(_)), "{error:?}");
    assert_eq!(rig.memory.revoke(TICKET).len(), 3);
}

async fn a_receiver_that_was_never_there_is_a_typed_error(rig: Rig) {
    (rig.disconnect)();
    let mut push = rig.transport.open(&rig.address, TICKET).expect("the address is valid");
    let sending = async {
        push.send(0, block(0)).await?;
        push.finish().await
    };
    assert!(matches!(sending.await, Err(TransferError::Gone(_))));
}

async fn a_receiver_that_goes_away_is_a_typed_error(rig: Rig) {
    rig.memory.give_out(TICKET, 0..100);
    let mut push = rig.open(TICKET);
    push.send(0, block(0)).await.expect("it is missing");
    push.send(1, block(1)).await.expect("it is missing");
    (rig.disconnect)();
    let sending = async {
        for index in 2..100 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    assert!(matches!(sending.await, Err(TransferError::Gone(_))));
    let landed = rig.memory.revoke(TICKET);
    assert!(landed.iter().all(|(index, payload)| *payload == block(*index)), "what landed is whole");
}

async fn a_push_dropped_half_way_leaves_whole_blocks_and_no_right(rig: Rig) {
    rig.memory.give_out(TICKET, 0..10);
    let mut push = rig.open(TICKET);
    for index in 0..5 {
        push.send(index, block(index)).await.expect("it is missing");
    }
    drop(push);
    let landed = rig.memory.revoke(TICKET);
    assert!(landed.len() <= 5 && landed.iter().all(|(index, payload)| *payload == block(*index)));
    assert!(matches!(rig.send(TICKET, 9, block(9)).await, Err(TransferError::Refused(_))), "the ticket was revoked");
    rig.memory.give_out(TICKET + 1, 0..1);
    rig.send(TICKET + 1, 0, block(0)).await.expect("the next transfer is not harmed");
}

async fn a_receiver_that_does_not_write_makes_the_sender_wait(rig: Rig) {
    const BLOCKS: u32 = 128;
    rig.memory.give_out(TICKET, 0..BLOCKS);
    rig.memory.hold();
    let mut push = rig.open(TICKET);
    let mut sent = 0;
    while let Ok(result) = tokio::time::timeout(PENDING, push.send(sent, block(sent))).await {
        result.expect("it is missing");
        sent += 1;
        assert!(sent < BLOCKS, "everything was taken although nothing was written");
    }
    rig.memory.release(usize::try_from(BLOCKS).expect("small"));
    for index in sent..BLOCKS {
        push.send(index, block(index)).await.expect("it is missing");
    }
    push.finish().await.expect("all are missing");
    let landed = rig.memory.revoke(TICKET);
    assert_eq!(landed.len(), 128);
    assert!(landed.iter().all(|(index, payload)| *payload == block(*index)));
}

async fn several_blocks_wait_to_be_written_at_a_time(rig: Rig) {
    rig.memory.give_out(TICKET, 0..8);
    rig.memory.hold();
    let mut push = rig.open(TICKET);
    let sending = async {
        for index in 0..8 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    let writing = async {
        let all = rig.memory.0.asked.acquire_many(8).await.expect("open");
        rig.memory.release(8);
        drop(all);
    };
    let (sent, ()) = tokio::join!(sending, writing);
    sent.expect("all are missing");
    assert_eq!(rig.memory.revoke(TICKET).len(), 8);
}

async fn finish_waits_for_the_last_block_to_land(rig: Rig) {
    rig.memory.give_out(TICKET, 0..2);
    rig.memory.hold();
    rig.memory.release(1);
    let mut push = rig.open(TICKET);
    for index in 0..2 {
        push.send(index, block(index)).await.expect("it is missing");
    }
    let mut finish = push.finish().boxed();
    assert!(tokio::time::timeout(PENDING, &mut finish).await.is_err(), "one block has not landed");
    rig.memory.release(1);
    finish.await.expect("both are missing");
    assert_eq!(rig.memory.revoke(TICKET).len(), 2);
}

async fn what_was_sent_lands_while_the_sender_waits_and_a_broken_push_says_so(rig: Rig) {
    rig.memory.give_out(TICKET, 0..1);
    rig.memory.hold();
    let mut push = rig.open(TICKET);
    push.send(0, block(0)).await.expect("it is missing");
    tokio::select! {
        error = push.broken() => panic!("nothing is wrong: {error:?}"),
        asked = rig.memory.0.asked.acquire() => asked.expect("open").forget(),
    }
    (rig.disconnect)();
    assert!(matches!(push.broken().await, TransferError::Gone(_)));
}

macro_rules! conformance {
    ($transport:ident: $($case:ident),* $(,)?) => {
        mod $transport {
            $(
                #[tokio::test]
                async fn $case() {
                    tokio::time::timeout(super::SOON, super::$case(super::$transport())).await.expect("it ends");
                }
            )*
        }
    };
    ($($transport:ident),*; $cases:tt) => {
        $(conformance!(@ $transport $cases);)*
    };
    (@ $transport:ident { $($case:ident),* $(,)? }) => {
        conformance!($transport: $($case),*);
    };
}

conformance!(loopback, tcp; {
    all_blocks_land_bit_equal_in_any_order,
    two_pushes_share_a_ticket_without_mixing,
    nothing_to_send_is_fine,
    a_wrong_ticket_is_refused,
    a_block_that_is_not_missing_is_refused,
    the_same_block_twice_is_refused,
    a_short_or_long_block_is_refused,
    a_refusal_in_the_middle_ends_the_push,
    a_receiver_that_was_never_there_is_a_typed_error,
    a_receiver_that_goes_away_is_a_typed_error,
    a_push_dropped_half_way_leaves_whole_blocks_and_no_right,
    a_receiver_that_does_not_write_makes_the_sender_wait,
    several_blocks_wait_to_be_written_at_a_time,
    finish_waits_for_the_last_block_to_land,
    what_was_sent_lands_while_the_sender_waits_and_a_broken_push_says_so,
});

#[test]
fn what_is_no_address_is_refused_at_once() {
    assert!(matches!(Tcp::default().open("no address", TICKET), Err(TransferError::Address(_))));
}
