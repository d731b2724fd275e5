//! What every transport must do, run for each of them.

mod faults;
mod rig;

use faults::*;
use futures::FutureExt;
use rig::*;
use tandem_proto::v1::{PushRequest, transfer_client::TransferClient};
use tandem_transfer::{ReadyBlocks, Tcp, TransferError, Transport};

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
    let mut push = rig.open(TICKET);
    (rig.disconnect)();
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
                    tokio::time::timeout(super::SOON, super::$case(super::rig::$transport())).await.expect("it ends");
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

conformance!(loopback, tcp, places; {
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
    several_blocks_wait_to_be_written_at_a_time,
    finish_waits_for_the_last_block_to_land,
    what_was_sent_lands_while_the_sender_waits_and_a_broken_push_says_so,
    a_late_write_is_refused_and_harms_nobody,
    a_spent_ticket_is_not_used_again,
    a_push_may_be_dropped_at_every_step,
    a_thousand_interleavings_keep_what_is_promised,
});

/// What is told of blocks that stay where they are weighs nothing: there is nothing to wait for.
#[tokio::test]
async fn a_sender_waits_where_blocks_travel() {
    a_receiver_that_does_not_write_makes_the_sender_wait(loopback()).await;
    a_receiver_that_does_not_write_makes_the_sender_wait(tcp()).await;
}

#[tokio::test]
async fn blocks_that_are_told_together_land_together_or_not_at_all() {
    let rig = places();
    rig.memory.give_out(TICKET, 0..4);
    let told = async |indices: &[u32]| {
        let source_blocks = indices.iter().map(|index| rig.memory.show(block(*index))).collect();
        let mut push = rig.transport.open(&rig.address, named(TICKET)).expect("the address is valid");
        push.ready(ReadyBlocks { block_indices: indices.to_vec(), source_blocks }).await?;
        push.finish().await
    };
    told(&[2, 0, 1]).await.expect("all are missing");
    assert!(matches!(told(&[3, 1]).await, Err(TransferError::Refused(_))));
    let landed = rig.memory.revoke(TICKET);
    assert!(landed.len() == 3 && landed.iter().all(|(index, payload)| *payload == block(*index)));
}

#[tokio::test]
async fn ticket_of_another_length_is_refused() {
    let rig = tcp();
    rig.memory.give_out(TICKET, 0..1);
    let mut client = TransferClient::connect(format!("http://{}", rig.address)).await.expect("it listens");
    let whole = named(TICKET).as_bytes().to_vec();
    for ticket in [Vec::new(), whole[8..].to_vec(), [&whole[..], &[0]].concat()] {
        let request = PushRequest { ticket, payload: block(0), ..PushRequest::default() };
        let refused = client.push(tokio_stream::iter([request])).await.expect_err("a ticket has 16 bytes");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
    assert!(rig.memory.revoke(TICKET).is_empty());
}

#[test]
fn what_is_no_address_is_refused_at_once() {
    assert!(matches!(Tcp::default().open("no address", named(TICKET)), Err(TransferError::Address(_))));
}
