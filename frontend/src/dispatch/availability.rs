//! Whether a router could place a request for a model, by the router's view of the cluster.

use tandem_proto::{
    Difference,
    v1::{Identity, WorkersReply},
};

/// Why a router cannot place requests for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unavailable {
    /// The router, or a worker of the model, belongs to another cluster.
    #[error(transparent)]
    ClusterMismatch(#[from] Difference),
    /// The reason, as a message for operators.
    #[error("{0}")]
    Cluster(String),
}

/// Checks that the router with this view could place a request for the model of this identity.
///
/// # Errors
/// The reason why it could not.
pub(crate) fn check(identity: &Identity, view: &WorkersReply) -> Result<(), Unavailable> {
    let fits = |cluster: &Option<Identity>| cluster.as_ref().map_or(Ok(()), |cluster| identity.fits(cluster));
    fits(&view.identity)?;
    let models = || view.models.iter().filter_map(|model| model.identity.as_ref());
    let served = view.models.iter().find(|model| model.identity.as_ref().is_some_and(|served| served.model == identity.model));
    if let Some(served) = served {
        fits(&served.identity)?;
    }
    let reason = view.unavailable_reason.clone().or_else(|| match served {
        Some(served) => served.unavailable_reason.clone(),
        // A router of an older version sends no models, and its identity names the only one.
        None if view.models.is_empty() => None,
        None => {
            let others: Vec<&str> = models().map(|served| &*served.model).collect();
            Some(format!("no worker serves {}; the workers serve {}", identity.model, others.join(", ")))
        }
    });
    reason.map_or(Ok(()), |reason| Err(Unavailable::Cluster(reason)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::ModelView;

    fn identity(model: &str, revision: &str) -> Identity {
        Identity { cluster: "c".to_owned(), model: model.to_owned(), revision: revision.to_owned(), ..Identity::default() }
    }

    fn view(models: &[(&str, &str, Option<&str>)]) -> WorkersReply {
        let model = |(model, revision, reason): &(&str, &str, Option<&str>)| ModelView {
            identity: Some(identity(model, revision)),
            workers: 1,
            unavailable_reason: reason.map(str::to_owned),
        };
        WorkersReply {
            identity: Some(Identity { cluster: "c".to_owned(), ..Identity::default() }),
            models: models.iter().map(model).collect(),
            ..WorkersReply::default()
        }
    }

    #[test]
    fn each_model_is_available_by_itself() {
        let both = view(&[("a", "1", None), ("b", "2", Some("no decode worker"))]);
        let draining = WorkersReply { unavailable_reason: Some("draining".to_owned()), ..both.clone() };
        let pinned = WorkersReply { identity: Some(identity("a", "1")), ..both.clone() };
        for (model, revision, view, expected) in [
            ("a", "1", &both, None),
            ("a", "", &both, None),
            ("b", "2", &both, Some("no decode worker")),
            ("c", "3", &both, Some("no worker serves c; the workers serve a, b")),
            ("a", "2", &both, Some("revision")),
            ("a", "1", &draining, Some("draining")),
            ("b", "2", &pinned, Some("model is b, but the cluster's is a")),
            ("a", "1", &view(&[]), None),
        ] {
            let found = check(&identity(model, revision), view).err().map(|why| why.to_string());
            let fits = match (&found, expected) {
                (Some(found), Some(expected)) => found.contains(expected),
                (found, expected) => found.is_none() && expected.is_none(),
            };
            assert!(fits, "{model} {revision}: {found:?} instead of {expected:?}");
        }
    }
}
