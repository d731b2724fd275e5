//! Tests of faults of senders, receivers and connections, in every order.

use crate::rig::*;
use bytes::Bytes;
use futures::{FutureExt, future::join_all};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    pin::Pin,
    time::Duration,
};
use tandem_proto::{
    channel,
    v1::{
        NcclControlReply, NcclControlRequest, PushReply, PushRequest, Ticket,
        transfer_server::{Transfer, TransferServer},
    },
};
use tandem_transfer::TransferError;
use tokio::net::{TcpListener, TcpStream};
use tonic::{Request, Response, Status, Streaming};

pub async fn late_write_is_refused_and_changes_no_block_of_another_ticket(rig: Rig) {
    rig.memory.issue(TICKET, 0..4);
    rig.memory.hold();
    rig.memory.0.begun.forget_permits(usize::MAX);
    let mut late = rig.open(TICKET).await;
    let late = async {
        late.send(0, block(0)).await?;
        late.finish().await
    };
    let mut late = late.boxed();
    let begun = tokio::select! {
        begun = rig.memory.0.begun.acquire() => begun,
        _ = &mut late => panic!("nothing has been written"),
    };
    begun.expect("the semaphore is open").forget();
    // The ticket is revoked while the block is being written, and its memory is reserved for another ticket.
    assert!(rig.memory.revoke(TICKET).is_empty());
    rig.memory.issue(TICKET + 1, 0..4);
    rig.memory.release(8);
    assert!(matches!(late.await, Err(TransferError::Refused(_))));
    rig.send(TICKET + 1, 1, block(1)).await.expect("the next transfer succeeds");
    let written = rig.memory.revoke(TICKET + 1);
    assert!(written.len() == 1 && written[&1] == block(1), "the late write changed no block");
}

pub async fn spent_ticket_is_refused(rig: Rig) {
    rig.memory.issue(TICKET, 0..2);
    for index in 0..2 {
        rig.send(TICKET, index, block(index)).await.expect("the receiver still needs the block");
    }
    for index in 0..3 {
        assert!(matches!(rig.send(TICKET, index, block(9)).await, Err(TransferError::Refused(_))));
    }
    let written = rig.memory.revoke(TICKET);
    assert!(written.len() == 2 && written.iter().all(|(index, payload)| *payload == block(*index)));
    assert!(matches!(rig.send(TICKET, 0, block(0)).await, Err(TransferError::Refused(_))), "a revoked ticket is refused");
}

/// Drops a transfer of three blocks before its first poll, the next transfer after one poll, and so on, until a transfer finishes.
pub async fn transfer_dropped_at_any_poll_has_written_only_complete_blocks(rig: Rig) {
    let mut polls = 0;
    for ticket in 1.. {
        rig.memory.issue_for(SMALL, ticket, 0..3);
        let mut push = rig.open(ticket).await;
        let mut transfer = Box::pin(async {
            for index in 0..3 {
                push.send(index, content(ticket, index)).await?;
            }
            push.finish().await
        });
        let mut left = polls;
        let whole = std::future::poll_fn(|context| {
            if left == 0 {
                return std::task::Poll::Ready(None);
            }
            left -= 1;
            transfer.as_mut().poll(context).map(Some)
        })
        .await;
        drop(transfer);
        let written = rig.memory.revoke(ticket);
        assert!(written.iter().all(|(index, payload)| *payload == content(ticket, *index)), "each block is complete");
        match whole {
            None => polls += 1,
            Some(result) => {
                result.expect("the transfer succeeds");
                assert_eq!(written.len(), 3);
                return;
            }
        }
    }
}

const SMALL: usize = 64;

fn content(ticket: u64, index: u32) -> Bytes {
    let seed = ((ticket << 32) | u64::from(index)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..SMALL as u64).map(|place| (seed.rotate_left(place as u32) >> 7) as u8).collect::<Vec<u8>>().into()
}

/// Pseudo-random numbers from a seed (a linear congruential generator with Knuth's constants).
struct Numbers(Cell<u64>);

impl Numbers {
    fn below(&self, bound: usize) -> usize {
        self.0.set(self.0.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
        (self.0.get() >> 33) as usize % bound
    }

    async fn pause(&self) {
        for _ in 0..self.below(6) {
            tokio::task::yield_now().await;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    WrongTicket,
    NotMissing,
    Twice,
    Short,
    Dropped,
}

/// One of the senders that are interleaved: its blocks, its fault, and the position in `indices` at which the fault occurs.
#[derive(Debug)]
struct Sender {
    ticket: u64,
    indices: Vec<u32>,
    fault: Fault,
    at: usize,
}

impl Sender {
    async fn run(&self, rig: &Rig, numbers: &Numbers) -> Option<Result<(), TransferError>> {
        let Self { ticket, fault, .. } = *self;
        let mut push = rig.open(if fault == Fault::WrongTicket { ticket ^ (1 << 40) } else { ticket }).await;
        for (place, index) in self.indices.iter().copied().enumerate() {
            numbers.pause().await;
            let bad = match fault {
                _ if place != self.at => None,
                Fault::None | Fault::WrongTicket => None,
                Fault::NotMissing => Some((index + 1_000, content(ticket, index))),
                Fault::Twice => Some((index, content(ticket, index))),
                Fault::Short => Some((index, content(ticket, index).slice(1..))),
                Fault::Dropped => return None,
            };
            for (index, payload) in bad.into_iter().chain([(index, content(ticket, index))]) {
                if let Err(error) = push.send(index, payload).await {
                    return Some(Err(error));
                }
            }
        }
        numbers.pause().await;
        Some(push.finish().await.map(drop))
    }
}

pub async fn written_blocks_are_correct_in_a_thousand_interleavings(rig: Rig) {
    for seed in 0..1_000_u64 {
        let numbers = Numbers(Cell::new(seed));
        let tickets = [seed * 4 + 1, seed * 4 + 2];
        let mut senders = Vec::new();
        for ticket in tickets {
            let blocks = 1 + numbers.below(10) as u32;
            rig.memory.issue_for(SMALL, ticket, 0..blocks);
            let (even, odd): (Vec<u32>, Vec<u32>) = (0..blocks).partition(|index| index % 2 == 0);
            for mut indices in [even, odd] {
                let rotation = numbers.below(indices.len().max(1));
                indices.rotate_left(rotation);
                let faults =
                    [Fault::None, Fault::None, Fault::WrongTicket, Fault::NotMissing, Fault::Twice, Fault::Short, Fault::Dropped];
                let faults = faults.map(|fault| if fault == Fault::Short && !rig.sends_any_size() { Fault::None } else { fault });
                let (fault, at) = (faults[numbers.below(faults.len())], numbers.below(indices.len().max(1)));
                senders.push(Sender { ticket, indices, fault, at });
            }
        }
        let revoked: RefCell<BTreeMap<u64, BTreeMap<u32, Bytes>>> = RefCell::default();
        let revoking = async {
            if numbers.below(2) == 0 {
                for _ in 0..numbers.below(12) {
                    numbers.pause().await;
                }
                revoked.borrow_mut().insert(tickets[0], rig.memory.revoke(tickets[0]));
            }
        };
        let (ends, ()) = tokio::join!(join_all(senders.iter().map(|sender| sender.run(&rig, &numbers))), revoking);
        let early = revoked.borrow().contains_key(&tickets[0]);
        let mut written = revoked.into_inner();
        for ticket in tickets {
            written.entry(ticket).or_insert_with(|| rig.memory.revoke(ticket));
        }
        for (ticket, blocks) in &written {
            for (index, payload) in blocks {
                assert!(*payload == content(*ticket, *index), "seed {seed}: block {index} of {ticket} has other bytes");
            }
        }
        for (sender, end) in senders.iter().zip(ends) {
            let of_revoked = early && sender.ticket == tickets[0];
            let whole = sender.indices.iter().all(|index| written[&sender.ticket].contains_key(index));
            let harmless = matches!(sender.fault, Fault::None) || sender.indices.is_empty();
            match end {
                Some(Ok(())) => assert!(
                    harmless && (whole || of_revoked),
                    "seed {seed}: {sender:?} received a confirmation of blocks that are missing"
                ),
                Some(Err(TransferError::Refused(_))) => {
                    assert!(!harmless || of_revoked, "seed {seed}: {sender:?} was refused");
                }
                Some(Err(error)) => panic!("seed {seed}: {sender:?}: {error}"),
                None => assert_eq!(sender.fault, Fault::Dropped, "seed {seed}"),
            }
            if sender.fault == Fault::WrongTicket {
                assert!(sender.indices.iter().all(|index| !written[&sender.ticket].contains_key(index)), "seed {seed}");
            }
        }
    }
}

struct Losing;

#[tonic::async_trait]
impl Transfer for Losing {
    type NcclControlStream = futures::stream::Empty<Result<NcclControlReply, Status>>;

    async fn nccl_control(&self, _: Request<Streaming<NcclControlRequest>>) -> Result<Response<Self::NcclControlStream>, Status> {
        Err(Status::unimplemented("the fake receiver has no communicators"))
    }

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let (mut requests, mut written_blocks) = (request.into_inner(), 0);
        while requests.message().await?.is_some() {
            written_blocks += 1;
        }
        Ok(Response::new(PushReply { written_blocks: written_blocks - 1 }))
    }
}

#[tokio::test]
async fn transfer_fails_if_the_receiver_reports_fewer_blocks_than_sent() {
    let rig = host().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("the listener is bound").to_string();
    let serving = channel::server().add_service(TransferServer::new(Losing)).serve_with_incoming(channel::incoming(listener));
    let pushing = async {
        let (ticket, _) = rig.negotiate("prefill-0", TICKET).await;
        let mut push = rig.sending(Ticket { address, ..ticket });
        for index in 0..3 {
            push.send(index, block(index)).await.expect("the receiver accepts the block");
        }
        push.finish().await
    };
    tokio::select! {
        served = serving => panic!("the receiver ended: {served:?}"),
        ended = tokio::time::timeout(SOON, pushing) => {
            assert!(matches!(ended.expect("the push ends in time"), Err(TransferError::Closed(_))), "the receiver wrote only two blocks");
        }
    }
}

/// Forwards this many bytes to the receiver, and then nothing in either direction, as a cut cable does.
async fn cable(listener: TcpListener, receiver: &str, bytes: u64) {
    let (mut from, _) = listener.accept().await.expect("the sender connects");
    let mut to = TcpStream::connect(receiver).await.expect("the receiver listens");
    let ((mut from_read, mut from_write), (mut to_read, mut to_write)) = (from.split(), to.split());
    let mut limited = Pin::new(&mut from_read);
    let mut limited = tokio::io::AsyncReadExt::take(&mut limited, bytes);
    let there = tokio::io::copy(&mut limited, &mut to_write);
    let back = tokio::io::copy(&mut to_read, &mut from_write);
    tokio::select! {
        _ = there => {}
        _ = back => {}
    }
    std::future::pending().await
}

#[tokio::test]
async fn transfer_over_a_silent_connection_fails_within_the_keep_alive_limit() {
    let rig = host().await;
    rig.memory.issue(TICKET, 0..20);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("the listener is bound").to_string();
    let pushing = async {
        let (ticket, _) = rig.negotiate("prefill-0", TICKET).await;
        let mut push = rig.sending(Ticket { address, ..ticket });
        for index in 0..20 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    let limit = channel::PING_INTERVAL + channel::PING_TIMEOUT + Duration::from_secs(5);
    tokio::select! {
        () = cable(listener, &rig.address, 3 << 20) => {}
        ended = tokio::time::timeout(limit, pushing) => {
            assert!(matches!(ended.expect("the push ends within the limit"), Err(TransferError::Closed(_))));
        }
    }
    let written = rig.memory.revoke(TICKET);
    assert!(!written.is_empty() && written.len() < 20);
    assert!(written.iter().all(|(index, payload)| *payload == block(*index)), "each block is complete");
}
