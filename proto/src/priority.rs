//! Conversions of a request's priority.

use crate::v1;
use tandem_kv::Priority;

impl From<Priority> for v1::Priority {
    fn from(Priority { across, within }: Priority) -> Self {
        Self { across, within }
    }
}

impl From<v1::Priority> for Priority {
    fn from(v1::Priority { across, within }: v1::Priority) -> Self {
        Self { across, within }
    }
}
