//! The KV events with which an engine reports its prefix cache over ZMQ, as vLLM and SGLang do: where they are published, and what they change in the
//! mirror.

mod decode;
mod subscription;

pub(crate) use decode::tier_of_medium;
pub use decode::{EventBatch, MalformedBatch, decode};
pub use subscription::{EventLoss, InvalidEndpoint, MirrorUpdate, Subscription, SubscriptionSettings};

use crate::{
    mirror::Mirror,
    server::{ConnectError, EngineEnded},
    shared::AdapterState,
};
use std::{str::FromStr, sync::Arc, time::Duration};
use tandem_kv::Tier;

/// Time limit for connecting the event socket, and for the arrival of each batch of a replay.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// If no events arrive for this long, the adapter checks whether events were lost.
const EVENTS_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of engine blocks in the mirror. The number is large because host memory may hold many times as many blocks as the device.
pub(crate) const MIRRORED_BLOCKS_MAX: usize = 1 << 22;

/// The addresses at which an engine publishes KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvents {
    /// The server reports the addresses. If it reports none, the cached blocks are assumed from the requests that were routed to it.
    Discover,
    /// The engine publishes KV events at the addresses in the settings.
    At {
        /// The address of the events: `tcp://HOST:PORT` or `ipc://PATH`.
        endpoint: String,
        /// The address for replays; `None` if the engine offers no replays.
        replay: Option<String>,
        /// The ZMQ topic under which the engine publishes its batches of KV events.
        topic: String,
    },
    /// The engine publishes no events. The cached blocks are assumed from the requests that were routed to the server.
    None,
}

impl KvEvents {
    /// Returns the addresses for one of several ranks. Those in the settings are the addresses of rank 0: engines add the rank to their ports.
    pub(crate) fn of_rank(self, rank: u32) -> Self {
        let of_rank = |endpoint: String| {
            let moved = endpoint.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
            moved.map_or(endpoint.clone(), |(host, port)| format!("{host}:{}", u32::from(port) + rank))
        };
        match self {
            Self::At { endpoint, replay, topic } => Self::At { endpoint: of_rank(endpoint), replay: replay.map(of_rank), topic },
            other => other,
        }
    }
}

/// The ZMQ endpoints and the topic of a rank's KV events, as the engine reports them.
#[derive(Clone, Debug)]
pub(crate) struct EventSource {
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
    pub topic: String,
}

/// A store outside of the server's host, from which several servers load each other's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedStore {
    /// The tier that the server's events name for blocks in the store.
    pub(crate) tier: Tier,
    /// The store's name, equal for all servers that use it.
    pub(crate) name: String,
}

impl FromStr for SharedStore {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (medium, name) = text.split_once('=').filter(|(_, name)| !name.is_empty()).ok_or("write MEDIUM=NAME")?;
        match tier_of_medium(medium) {
            None | Some(Tier::Device) => Err(format!("{medium:?} is no medium of a store; use CPU, DISK, STORAGE or EXTERNAL")),
            Some(tier) => Ok(Self { tier, name: name.to_owned() }),
        }
    }
}

impl From<InvalidEndpoint> for ConnectError {
    fn from(error: InvalidEndpoint) -> Self {
        Self::Endpoint(error.to_string())
    }
}

/// Subscribes to the engine's KV events; `discover` asks the engine where it publishes them. Returns the endpoint and the subscription; `None` if
/// the engine publishes no events.
pub(crate) async fn subscribe(
    events: &KvEvents,
    discover: impl Future<Output = Option<EventSource>>,
    rank: u32,
    host: &str,
) -> Result<Option<(String, Subscription)>, ConnectError> {
    let source = match events {
        KvEvents::None => None,
        KvEvents::At { endpoint, replay, topic } => Some((endpoint.clone(), replay.clone(), topic.clone())),
        KvEvents::Discover => discover.await.map(|source| reachable(source, host)).transpose()?,
    };
    let Some((endpoint, replay_endpoint, topic)) = source else { return Ok(None) };
    let subscription = Subscription::start(SubscriptionSettings {
        endpoint: endpoint.clone(),
        replay_endpoint,
        topic,
        data_parallel_rank: rank,
        timeout: EVENTS_TIMEOUT,
        check_interval: EVENTS_CHECK_INTERVAL,
    })?;
    Ok(Some((endpoint, subscription)))
}

/// Returns the source's addresses and topic. The engine's host replaces wildcard addresses, such as `*`, and loopback addresses.
///
/// # Errors
/// Fails if an address is on another host. So an engine cannot make the worker connect to other servers.
fn reachable(source: EventSource, host: &str) -> Result<(String, Option<String>, String), ConnectError> {
    const LOOPBACK: [&str; 3] = ["127.0.0.1", "[::1]", "localhost"];
    const ALL: [&str; 3] = ["*", "0.0.0.0", "[::]"];
    let at = |endpoint: String| {
        let address = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
        match address {
            Some((of, port)) if of.eq_ignore_ascii_case(host) || LOOPBACK.contains(&of) || ALL.contains(&of) => {
                Ok(format!("tcp://{host}:{port}"))
            }
            None if endpoint.starts_with("ipc://") && LOOPBACK.contains(&host) => Ok(endpoint),
            _ => Err(ConnectError::Endpoint(format!(
                "the engine at {host} reports {endpoint:?} as an address of its KV events, which is not on that host; if the address is right, set \
                 --engine-events to it, otherwise change the engine's --kv-events-config"
            ))),
        }
    };
    Ok((at(source.endpoint)?, source.replay_endpoint.map(at).transpose()?, source.topic))
}

pub(crate) async fn follow(shared: Arc<AdapterState>, subscription: Option<Subscription>) -> EngineEnded {
    let Some(mut subscription) = subscription else { return std::future::pending().await };
    let mut ignored = 0;
    loop {
        match subscription.next().await {
            Some(MirrorUpdate::Batch(events)) => shared.update(|mirror| {
                mirror.apply(&events);
                let kinds = mirror.ignored_kinds();
                if kinds.len() > ignored {
                    ignored = kinds.len();
                    tracing::warn!(?kinds, "the engine has layers whose rule for reuse is unknown; their cached blocks are ignored, so more cached tokens may be predicted than the engine finds");
                }
            }),
            Some(MirrorUpdate::Lost(reason)) => {
                tracing::warn!(%reason, "KV events of the engine were lost; its cache counts as empty until it reports blocks again");
                shared.update(Mirror::clear);
            }
            Some(MirrorUpdate::Restarted) => return EngineEnded::Restarted,
            None => {
                tracing::error!("the task that receives KV events has failed; the worker connects to its engine again");
                return EngineEnded::Gone;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_only_from_the_engines_host() {
        let from = |host: &str, endpoint: &str, replay: &str| {
            let source =
                EventSource { endpoint: endpoint.to_owned(), replay_endpoint: Some(replay.to_owned()), topic: "kv".to_owned() };
            reachable(source, host)
        };
        for (host, endpoint, at) in [
            ("gpu-1", "tcp://*:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://[::]:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://127.0.0.1:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://GPU-1:5557", "tcp://gpu-1:5557"),
            ("[::1]", "tcp://0.0.0.0:5557", "tcp://[::1]:5557"),
            ("127.0.0.1", "ipc:///run/events", "ipc:///run/events"),
        ] {
            let (endpoint, replay, topic) = from(host, endpoint, endpoint).expect(endpoint);
            assert_eq!((&*endpoint, replay.as_deref(), &*topic), (at, Some(at), "kv"));
        }
        for (host, foreign) in [
            ("gpu-1", "tcp://gpu-2:5557"),
            ("127.0.0.1", "tcp://169.254.169.254:80"),
            ("gpu-1", "tcp://gpu-1@gpu-2:5557"),
            ("gpu-1", "ipc:///run/events"),
            ("gpu-1", "inproc://events"),
        ] {
            for (endpoint, replay) in [(foreign, "tcp://*:1"), ("tcp://*:1", foreign)] {
                let error = from(host, endpoint, replay).expect_err(foreign).to_string();
                assert!(error.contains(foreign) && error.contains("--engine-events"), "{error}");
            }
        }
    }

    #[test]
    fn rank_is_added_to_the_ports_of_kv_events() {
        let at = |endpoint: &str, replay: &str| KvEvents::At {
            endpoint: endpoint.to_owned(),
            replay: Some(replay.to_owned()),
            topic: "kv".to_owned(),
        };
        let events = at("tcp://engine:5557", "tcp://[::1]:5657");
        assert_eq!(events.clone().of_rank(3), at("tcp://engine:5560", "tcp://[::1]:5660"));
        assert_eq!([events.clone().of_rank(0), KvEvents::None.of_rank(3)], [events, KvEvents::None]);
    }
}
