//! The conformance suite of transfer paths. Every test runs on each path; a comment gives the reason where one does not.

mod device;
mod faults;
mod negotiation;
mod rig;

use faults::*;
use futures::FutureExt;
use rig::*;
use tandem_proto::v1::{PushRequest, Ticket, TransferPath, transfer_client::TransferClient};
use tandem_transfer::{TicketError, TransferError};

async fn all_blocks_are_written_bit_equal_in_any_order(rig: Rig) {
    for (ticket, order) in [(1, [0, 1, 2, 3, 4, 5]), (2, [5, 4, 3, 2, 1, 0]), (3, [3, 0, 5, 1, 4, 2])] {
        rig.memory.issue(ticket, order.map(|index| index * 3));
        let mut push = rig.open(ticket).await;
        for index in order {
            push.send(index * 3, block(index)).await.expect("the receiver still needs the block");
        }
        push.finish().await.expect("the receiver still needs all blocks");
        let written = rig.memory.revoke(ticket);
        assert_eq!(written.len(), order.len());
        for index in order {
            assert!(written[&(index * 3)] == block(index), "block {index} has other bytes");
        }
    }
}

async fn two_transfers_with_one_ticket_write_their_own_blocks(rig: Rig) {
    rig.memory.issue(TICKET, 0..8);
    let (mut even, mut odd) = (rig.open(TICKET).await, rig.open(TICKET).await);
    for index in (0..8).step_by(2) {
        even.send(index, block(index)).await.expect("the receiver still needs the block");
        odd.send(index + 1, block(index + 1)).await.expect("the receiver still needs the block");
    }
    even.finish().await.expect("the receiver still needs all blocks");
    odd.finish().await.expect("the receiver still needs all blocks");
    assert!(rig.memory.revoke(TICKET).iter().all(|(index, payload)| *payload == block(*index)));
}

async fn transfer_without_blocks_succeeds(rig: Rig) {
    rig.memory.issue(TICKET, []);
    rig.open(TICKET).await.finish().await.expect("an empty transfer cannot be refused");
}

async fn unknown_ticket_is_refused(rig: Rig) {
    rig.memory.issue(TICKET, 0..4);
    for wrong in [0, TICKET ^ 1, u64::MAX] {
        assert!(matches!(rig.send(wrong, 0, block(0)).await, Err(TransferError::Refused(_))));
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn block_that_is_not_missing_is_refused(rig: Rig) {
    rig.memory.issue(TICKET, 2..4);
    for held in [0, 1, 4, u32::MAX] {
        assert!(matches!(rig.send(TICKET, held, block(held)).await, Err(TransferError::Refused(_))));
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn block_sent_twice_is_refused(rig: Rig) {
    rig.memory.issue(TICKET, 0..2);
    rig.send(TICKET, 0, block(0)).await.expect("the receiver still needs the block");
    assert!(matches!(rig.send(TICKET, 0, block(1)).await, Err(TransferError::Refused(_))));
    let mut push = rig.open(TICKET).await;
    push.send(1, block(1)).await.expect("the receiver still needs the block");
    let second = async {
        push.send(1, block(1)).await?;
        push.finish().await
    };
    assert!(matches!(second.await, Err(TransferError::Refused(_))));
    let written = rig.memory.revoke(TICKET);
    assert!(written[&0] == block(0) && written[&1] == block(1), "the second write changed no block");
}

async fn block_of_another_size_is_refused(rig: Rig) {
    if !rig.sends_any_size() {
        return;
    }
    rig.memory.issue(TICKET, 0..2);
    for bytes in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES] {
        assert!(matches!(rig.send(TICKET, 0, vec![7; bytes].into()).await, Err(TransferError::Refused(_))), "{bytes}");
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

async fn refused_block_ends_the_transfer(rig: Rig) {
    rig.memory.issue(TICKET, 0..3);
    let mut push = rig.open(TICKET).await;
    for index in 0..3 {
        push.send(index, block(index)).await.expect("the receiver still needs the block");
    }
    // The decode worker does not lack these blocks. Its refusal arrives while more blocks are sent.
    let sending = async {
        for index in 3..200 {
            push.send(index, block(0)).await?;
        }
        push.finish().await
    };
    let error = sending.await.expect_err("the blocks are refused");
    assert!(matches!(error, TransferError::Refused(_)), "{error:?}");
    assert_eq!(rig.memory.revoke(TICKET).len(), 3);
}

async fn unreachable_receiver_is_reported(rig: Rig) {
    let mut push = rig.open(TICKET).await;
    rig.disconnect();
    let sending = async {
        push.send(0, block(0)).await?;
        push.finish().await
    };
    assert!(matches!(sending.await, Err(TransferError::Closed(_))));
}

async fn receiver_that_disconnects_is_reported(rig: Rig) {
    rig.memory.issue(TICKET, 0..100);
    let mut push = rig.open(TICKET).await;
    push.send(0, block(0)).await.expect("the receiver still needs the block");
    push.send(1, block(1)).await.expect("the receiver still needs the block");
    rig.disconnect();
    let sending = async {
        for index in 2..100 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    let error = sending.await.expect_err("the receiver is gone");
    assert!(matches!(error, TransferError::Closed(_)), "{error:?}");
    let written = rig.memory.revoke(TICKET);
    assert!(written.iter().all(|(index, payload)| *payload == block(*index)), "each block is complete");
}

async fn dropped_transfer_has_written_only_complete_blocks_and_its_ticket_can_be_revoked(rig: Rig) {
    rig.memory.issue(TICKET, 0..10);
    let mut push = rig.open(TICKET).await;
    for index in 0..5 {
        push.send(index, block(index)).await.expect("the receiver still needs the block");
    }
    drop(push);
    let written = rig.memory.revoke(TICKET);
    assert!(written.len() <= 5 && written.iter().all(|(index, payload)| *payload == block(*index)));
    assert!(matches!(rig.send(TICKET, 9, block(9)).await, Err(TransferError::Refused(_))), "the ticket was revoked");
    rig.memory.issue(TICKET + 1, 0..1);
    rig.send(TICKET + 1, 0, block(0)).await.expect("the next transfer succeeds");
}

async fn sender_waits_while_the_receiver_does_not_write(rig: Rig) {
    const BLOCKS: u32 = 4_096;
    rig.memory.issue(TICKET, 0..BLOCKS);
    rig.memory.hold();
    let mut push = rig.open(TICKET).await;
    let mut sent = 0;
    while let Ok(result) = tokio::time::timeout(PENDING, push.send(sent, block(sent))).await {
        result.expect("the receiver still needs the block");
        sent += 1;
        assert!(sent < BLOCKS, "all blocks were accepted although none was written");
    }
    rig.memory.release(usize::try_from(BLOCKS).expect("the number of blocks is small"));
    for index in sent..BLOCKS {
        push.send(index, block(index)).await.expect("the receiver still needs the block");
    }
    push.finish().await.expect("the receiver still needs all blocks");
    let written = rig.memory.revoke(TICKET);
    assert_eq!(written.len(), BLOCKS as usize);
    assert!(written.iter().all(|(index, payload)| *payload == block(*index)));
}

async fn several_blocks_are_being_written_at_a_time(rig: Rig) {
    if rig.path == TransferPath::Nccl {
        // This test does not apply to a communicator, because it moves one batch of blocks at a time.
        return;
    }
    rig.memory.issue(TICKET, 0..8);
    rig.memory.hold();
    rig.memory.0.begun.forget_permits(usize::MAX);
    let mut push = rig.open(TICKET).await;
    let sending = async {
        for index in 0..8 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    let writing = async {
        let all = rig.memory.0.begun.acquire_many(8).await.expect("the semaphore is open");
        rig.memory.release(8);
        drop(all);
    };
    let (sent, ()) = tokio::join!(sending, writing);
    sent.expect("the receiver still needs all blocks");
    assert_eq!(rig.memory.revoke(TICKET).len(), 8);
}

async fn finish_waits_until_the_last_block_is_written(rig: Rig) {
    rig.memory.issue(TICKET, 0..2);
    rig.memory.hold();
    rig.memory.release(1);
    let mut push = rig.open(TICKET).await;
    let transfer = async {
        for index in 0..2 {
            push.send(index, block(index)).await?;
        }
        push.finish().await
    };
    let mut transfer = transfer.boxed();
    assert!(tokio::time::timeout(PENDING, &mut transfer).await.is_err(), "one block is not written");
    rig.memory.release(1);
    transfer.await.expect("the receiver still needs both blocks");
    assert_eq!(rig.memory.revoke(TICKET).len(), 2);
}

async fn disconnection_is_reported_while_a_sent_block_is_being_written(rig: Rig) {
    rig.memory.issue(TICKET, 0..1);
    rig.memory.hold();
    let mut push = rig.open(TICKET).await;
    let waiting = async {
        push.send(0, block(0)).await?;
        Err::<(), _>(push.interrupted().await)
    };
    let mut waiting = waiting.boxed();
    // Earlier prompts, which prepared the path, also began writes and added permits to `begun`. These permits are discarded, so that the next
    // permit shows that the write of this block has begun.
    rig.memory.0.begun.forget_permits(usize::MAX);
    tokio::select! {
        ended = &mut waiting => panic!("the transfer ended before the disconnection: {ended:?}"),
        begun = rig.memory.0.begun.acquire() => begun.expect("the semaphore is open").forget(),
    }
    rig.disconnect();
    assert!(matches!(waiting.await, Err(TransferError::Closed(_))));
}

macro_rules! conformance {
    ($path:ident { $($case:ident),* $(,)? }) => {
        mod $path {
            $(
                #[tokio::test]
                async fn $case() {
                    let test = async { super::$case(super::rig::$path().await).await };
                    tokio::time::timeout(super::SOON, test).await.expect("the test ends in time");
                }
            )*
        }
    };
    ($($path:ident),*; $cases:tt) => {
        $(conformance!($path $cases);)*
    };
}

conformance!(host, simulated, ipc, nccl; {
    all_blocks_are_written_bit_equal_in_any_order,
    two_transfers_with_one_ticket_write_their_own_blocks,
    transfer_without_blocks_succeeds,
    unknown_ticket_is_refused,
    block_that_is_not_missing_is_refused,
    block_sent_twice_is_refused,
    block_of_another_size_is_refused,
    refused_block_ends_the_transfer,
    unreachable_receiver_is_reported,
    receiver_that_disconnects_is_reported,
    dropped_transfer_has_written_only_complete_blocks_and_its_ticket_can_be_revoked,
    several_blocks_are_being_written_at_a_time,
    finish_waits_until_the_last_block_is_written,
    disconnection_is_reported_while_a_sent_block_is_being_written,
    blocks_sent_together_are_written_together_or_not_at_all,
    late_write_is_refused_and_changes_no_block_of_another_ticket,
    spent_ticket_is_refused,
    transfer_dropped_at_any_poll_has_written_only_complete_blocks,
    written_blocks_are_correct_in_a_thousand_interleavings,
});

/// The test does not apply to CUDA IPC, where the announcement of blocks never waits for the receiver. It does not apply to NCCL either,
/// where a communicator's `send` always waits.
#[tokio::test]
async fn sender_waits_while_the_receiver_does_not_write_on_host_and_simulated_paths() {
    sender_waits_while_the_receiver_does_not_write(host().await).await;
    sender_waits_while_the_receiver_does_not_write(simulated().await).await;
}

/// The test does not apply to the host path, because each of its messages carries only one block.
async fn blocks_sent_together_are_written_together_or_not_at_all(rig: Rig) {
    if rig.path == TransferPath::Tcp {
        return;
    }
    rig.memory.issue(TICKET, 0..4);
    let send = async |indices: &[u32]| {
        let mut push = rig.open(TICKET).await;
        push.send_all(indices.iter().map(|index| (*index, block(*index))).collect()).await?;
        push.finish().await
    };
    send(&[2, 0, 1]).await.expect("the receiver still needs all blocks");
    assert!(matches!(send(&[3, 1]).await, Err(TransferError::Refused(_))));
    let written = rig.memory.revoke(TICKET);
    assert!(written.len() == 3 && written.iter().all(|(index, payload)| *payload == block(*index)));
}

#[tokio::test]
async fn ticket_of_another_length_is_refused() {
    let rig = host().await;
    rig.memory.issue(TICKET, 0..1);
    let mut client = TransferClient::connect(format!("http://{}", rig.address)).await.expect("the receiver accepts connections");
    let whole = named(TICKET).as_bytes().to_vec();
    for ticket in [Vec::new(), whole[8..].to_vec(), [&whole[..], &[0]].concat()] {
        let request = PushRequest { ticket, payload: block(0), ..PushRequest::default() };
        let refused = client.push(tokio_stream::iter([request])).await.expect_err("a ticket has 16 bytes");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

#[tokio::test]
async fn invalid_ticket_is_refused_before_a_connection_is_made() {
    let rig = host().await;
    let (ticket, _) = rig.negotiate("prefill-0", TICKET).await;
    let refused = |ticket| match rig.open_ticket(ticket) {
        Err(TransferError::Ticket(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the ticket must be refused"),
    };
    assert!(matches!(refused(Ticket { address: "no address".to_owned(), ..ticket.clone() }), TicketError::Address(_)));
    assert!(matches!(refused(Ticket { ticket: vec![7; 8], ..ticket.clone() }), TicketError::Length(_)));
    for path in [TransferPath::CudaIpc, TransferPath::Nccl] {
        assert_eq!(refused(Ticket { path: path.into(), ..ticket.clone() }), TicketError::NotOffered);
    }
}
