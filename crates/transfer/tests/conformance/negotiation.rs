//! The choice of a ticket's path: preparation, fallback to TCP, backoff, and bounds.

use crate::rig::*;
use tandem_proto::v1::{NcclControlRequest, TransferPath, transfer_client::TransferClient};
use tandem_transfer::TransferError;

#[tokio::test]
async fn transfers_use_tcp_after_a_communicator_has_failed_until_a_new_one_is_joined() {
    let rig = nccl().await;
    rig.memory.issue(TICKET, 0..1);
    rig.source.break_next();
    assert!(matches!(rig.send(TICKET, 0, block(0)).await, Err(TransferError::Closed(_))));
    // Tickets name the closed communicator until the receiver has noticed that the communicator is closed.
    let falls_back = async {
        for ticket in TICKET + 1.. {
            let (issued, negotiated) = rig.negotiate("prefill-0", ticket).await;
            if issued.path() == TransferPath::Tcp {
                assert_eq!(
                    (negotiated.label(), issued.communicator.len()),
                    ("tcp", 0),
                    "the next communicator is not joined immediately"
                );
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, falls_back).await.expect("the communicator is closed");
    let over_tcp = tokio::time::timeout(SOON, rig.prepare(1 << 51)).await.expect("another communicator is joined");
    assert!(over_tcp > 0, "prompts use TCP until the next communicator is open");
    rig.memory.issue(TICKET + 1, 0..1);
    rig.send(TICKET + 1, 0, block(0)).await.expect("the receiver still needs the block");
}

#[tokio::test]
async fn at_most_four_communicators_are_being_joined_at_the_same_time() {
    let rig = nccl().await;
    let mut joining = Vec::new();
    for peer in 0..8 {
        joining.push(rig.negotiate(&format!("peer-{peer}"), TICKET + peer).await);
    }
    assert!(
        joining.iter().all(|(ticket, _)| ticket.path() == TransferPath::Tcp),
        "blocks are sent over TCP while communicators are joined"
    );
    let named = joining.iter().filter(|(ticket, _)| !ticket.communicator.is_empty()).count();
    assert_eq!(named, 4, "further communicators are not queued to be joined");
    // The tickets are dropped before their blocks were written. So their communicators are not joined any more, and the paths to these peers
    // are excluded for some time.
    joining.clear();
    let (again, _) = rig.negotiate("peer-0", TICKET).await;
    assert!(again.communicator.is_empty(), "the path to peer-0 has just failed");
    let (other, _) = rig.negotiate("peer-7", TICKET).await;
    assert!(!other.communicator.is_empty());
}

#[tokio::test]
async fn control_stream_is_refused_if_its_communicator_is_unknown_or_already_has_a_stream() {
    let rig = nccl().await;
    let (ticket, _) = rig.negotiate("prefill-0", TICKET).await;
    assert_eq!(ticket.path(), TransferPath::Nccl);
    let mut client = TransferClient::connect(format!("http://{}", rig.address)).await.expect("the receiver accepts connections");
    for communicator in [ticket.communicator, vec![7; 128], Vec::new()] {
        let first = NcclControlRequest { communicator, ..NcclControlRequest::default() };
        let refused = client.nccl_control(tokio_stream::iter([first])).await.expect_err("the NCCL message is refused");
        assert_eq!(refused.code(), tonic::Code::NotFound);
    }
    rig.memory.issue(TICKET, 0..1);
    rig.send(TICKET, 0, block(0)).await.expect("the open communicator still works");
}

#[tokio::test]
async fn workers_without_devices_in_common_use_tcp() {
    for rig in [host().await, simulated().await] {
        let (ticket, negotiated) = rig.negotiate("prefill-0", TICKET).await;
        assert_eq!((ticket.path(), ticket.wants_ipc_handle, negotiated.label()), (TransferPath::Tcp, false, "tcp"));
        assert!(ticket.communicator.is_empty());
    }
}
