//! Signed addresses. Workers and frontends connect to no other addresses.
//!
//! A request names workers by address, so without signatures its sender could make a worker connect to any address. The router signs each
//! address in a placement, together with the instance that it found there. A decode worker signs its own address for the prefill worker
//! that receives it. A signature covers an instance id, which is new at every start of a process, and no time: clocks need not agree, and
//! the signature is of no use once the instance has ended.

use crate::{
    ClusterKey, Purpose,
    v1::{Placement, Ticket, WorkerRef, worker_info::Role},
};

impl WorkerRef {
    /// Signs the address of a worker that has this role. Returns the worker's reference with the signature.
    pub fn with_signed_address(mut self, role: Role, key: &ClusterKey) -> Self {
        self.signature = key.sign(Purpose::Address, &self.signed_as(role));
        self
    }

    /// Returns whether a process with the cluster key has signed this worker's address. The result is always true if the cluster has no key.
    pub fn has_signed_address(&self, role: Role, key: &ClusterKey) -> bool {
        key.verifies(Purpose::Address, &self.signed_as(role), &self.signature)
    }

    fn signed_as(&self, role: Role) -> [&[u8]; 3] {
        [role.as_str_name().as_bytes(), self.instance_id.as_bytes(), self.address.as_bytes()]
    }
}

impl Placement {
    /// Returns this placement with signed addresses of its workers.
    pub fn with_signed_addresses(mut self, key: &ClusterKey) -> Self {
        for (candidate, role) in [(&mut self.decode, Role::Decode), (&mut self.prefill, Role::Prefill)] {
            if let Some(candidate) = candidate {
                candidate.worker = candidate.worker.take().map(|worker| worker.with_signed_address(role, key));
            }
        }
        self
    }
}

impl Ticket {
    /// Returns this ticket with its address signed for one prefill worker's instance.
    pub fn with_signed_address(mut self, prefill_instance_id: &str, key: &ClusterKey) -> Self {
        self.address_signature = key.sign(Purpose::Address, &self.signed_for(prefill_instance_id));
        self
    }

    /// Returns whether a process with the cluster key has signed the ticket's address for this prefill worker's instance. The result is always true
    /// if the cluster has no key.
    pub fn has_signed_address(&self, prefill_instance_id: &str, key: &ClusterKey) -> bool {
        key.verifies(Purpose::Address, &self.signed_for(prefill_instance_id), &self.address_signature)
    }

    fn signed_for<'a>(&'a self, prefill_instance_id: &'a str) -> [&'a [u8]; 3] {
        [b"ticket", prefill_instance_id.as_bytes(), self.address.as_bytes()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::Candidate;

    fn worker() -> WorkerRef {
        WorkerRef { worker_id: "p".to_owned(), instance_id: "i".to_owned(), address: "a:1".to_owned(), ..Default::default() }
    }

    #[test]
    fn signature_is_valid_for_one_role_instance_and_address_only() {
        let (key, other) = (ClusterKey::random(), ClusterKey::random());
        let signed = worker().with_signed_address(Role::Prefill, &key);
        assert!(signed.has_signed_address(Role::Prefill, &key));
        assert!(!signed.has_signed_address(Role::Decode, &key) && !signed.has_signed_address(Role::Prefill, &other));
        assert!(!worker().has_signed_address(Role::Prefill, &key), "a worker without a signature has no signed address");
        for changed in [
            WorkerRef { address: "b:1".to_owned(), ..signed.clone() },
            WorkerRef { instance_id: "j".to_owned(), ..signed.clone() },
            WorkerRef { instance_id: "ia".to_owned(), address: ":1".to_owned(), ..signed.clone() },
        ] {
            assert!(!changed.has_signed_address(Role::Prefill, &key), "{changed:?}");
        }
        let none = ClusterKey::default();
        assert!(
            worker().with_signed_address(Role::Prefill, &none) == worker() && worker().has_signed_address(Role::Prefill, &none)
        );
    }

    #[test]
    fn addresses_in_a_placement_are_signed_for_their_roles() {
        let key = ClusterKey::random();
        let candidate = || Some(Candidate { worker: Some(worker()), ..Default::default() });
        let placement = Placement { decode: candidate(), prefill: candidate(), ..Default::default() }.with_signed_addresses(&key);
        for (candidate, role) in [(placement.decode, Role::Decode), (placement.prefill, Role::Prefill)] {
            assert!(candidate.and_then(|candidate| candidate.worker).is_some_and(|worker| worker.has_signed_address(role, &key)));
        }
    }

    #[test]
    fn signed_ticket_address_is_valid_for_one_prefill_worker_only() {
        let key = ClusterKey::random();
        let ticket = Ticket { address: "a:1".to_owned(), ..Default::default() }.with_signed_address("i", &key);
        assert!(ticket.has_signed_address("i", &key) && !ticket.has_signed_address("j", &key));
        assert!(!Ticket { address: "b:1".to_owned(), ..ticket.clone() }.has_signed_address("i", &key));
        let worker = WorkerRef { signature: ticket.address_signature, ..worker() };
        assert!(!worker.has_signed_address(Role::Prefill, &key) && !worker.has_signed_address(Role::Decode, &key));
    }
}
