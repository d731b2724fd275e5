//! Ids of workers, instances and requests. Each kind has its own type, so that one kind cannot be used in place of another.

use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl<T: Into<Arc<str>>> From<T> for $name {
            fn from(text: T) -> Self {
                Self(text.into())
            }
        }

        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                self
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self)
            }
        }
    )*};
}

id! {
    /// A worker's stable name, which the operator chooses; also the label of the worker's metrics. It is cheap to clone.
    WorkerId,
    /// The id of one run of a process. It is new at every start. It is cheap to clone.
    InstanceId,
    /// The id of one prompt of a client's request. It is the same on all processes that serve the prompt. It is cheap to clone.
    RequestId,
}
