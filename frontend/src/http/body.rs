//! Reads request bodies within bounds of size, speed and memory.
//!
//! A body is read before the request reserves sequences, so a slow or huge body uses only memory for the bytes that have arrived. The
//! number of connections bounds the number of bodies.

use crate::{admission::Client, error::ApiError, shares::Shares};
use axum::{
    body::{Body, HttpBody},
    http::{HeaderMap, header},
};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use memmap2::MmapMut;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

/// The minimum speed of a body. It is low for any network connection, but prevents that many slow requests use up all connections.
const BYTES_PER_SECOND: u32 = 16 << 10;
/// The maximum pause of a body, and its maximum delay behind [`BYTES_PER_SECOND`]: enough for a few lost packets.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The first bytes of each body do not count, so that ordinary requests are read while large ones fill the budget. 8,192 connections
/// hold 128 MiB of these at most.
const UNCOUNTED_BYTES: usize = 16 << 10;
/// A body that grows beyond this is moved to a memory mapping of its own.
const MAPPED_FROM_BYTES: usize = 256 << 10;
/// The maximum of bytes that are discarded of a refused body.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the bodies of all requests of a process.
pub(super) struct Bodies {
    max: usize,
    budget: Arc<Semaphore>,
    /// At most half of the budget for each client.
    shares: Shares<Client>,
}

/// What a body uses of the client's share and of the whole budget; released on drop.
pub(super) type Held = Vec<OwnedSemaphorePermit>;

impl Bodies {
    /// `max`: bytes of one body. `budget`: bytes of all bodies that are read or parsed at a time.
    pub(super) fn new(max: usize, budget: usize) -> Self {
        let shares = Shares::new(budget.div_ceil(2));
        Self { max, budget: Arc::new(Semaphore::new(budget.min(Semaphore::MAX_PERMITS))), shares }
    }

    /// Reads a whole body of this client.
    ///
    /// # Errors
    /// It is too large, too slow, not whole, not sent as plain JSON, or the budget is spent. After an error the rest of the body is read,
    /// within bounds, because the client reads the reply only after it has sent its request.
    pub(super) async fn read(
        &self,
        client: Option<&Client>,
        headers: &HeaderMap,
        mut body: Body,
    ) -> Result<(Bytes, Held), ApiError> {
        let read = match is_json(headers) {
            Ok(()) => self.collect(client, &mut body).await,
            Err(error) => Err(error),
        };
        if !matches!(read, Ok(_) | Err(ApiError::BodySlow { .. } | ApiError::BodyBroken)) {
            discard(body).await;
        }
        read
    }

    async fn collect(&self, client: Option<&Client>, body: &mut Body) -> Result<(Bytes, Held), ApiError> {
        let too_large = ApiError::BodyTooLarge { max: self.max };
        if body.size_hint().lower() > self.max as u64 {
            return Err(too_large);
        }
        let budgets = client.map(|client| self.shares.of(client)).into_iter().chain([Arc::clone(&self.budget)]);
        let held = budgets.map(|budget| budget.try_acquire_many_owned(0).map_err(|_| ApiError::BodyBudget));
        let mut held = held.collect::<Result<Held, _>>()?;
        // Without an announced length, the mapping has the size of the largest body.
        let announced = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
        let max = announced.map_or(self.max, |announced| announced.min(self.max));
        let (mut bytes, mut deadline) = (Buffer::new(max), Instant::now() + PAUSE_MAX);
        loop {
            let frame = timeout_at(deadline, body.frame()).await;
            let Some(frame) = frame.map_err(|_| ApiError::BodySlow { bytes_per_second: BYTES_PER_SECOND })? else { break };
            let Ok(data) = frame.map_err(|_| ApiError::BodyBroken)?.into_data() else { continue };
            if bytes.len() + data.len() > max {
                return Err(too_large);
            }
            let counted = (bytes.len() + data.len()).saturating_sub(UNCOUNTED_BYTES).min(data.len());
            grow(&mut held, counted)?;
            bytes.append(&data)?;
            let worth = Duration::from_secs_f64(data.len() as f64 / f64::from(BYTES_PER_SECOND));
            deadline = (deadline + worth).min(Instant::now() + PAUSE_MAX);
        }
        Ok((bytes.freeze(), held))
    }
}

/// The bytes of one body so far. A large body is stored in an anonymous memory mapping, which uses memory only for written pages and
/// returns it to the system at once. With buffers on the heap, 50 clients that sent 32 MiB each left a process with twice the budget in use.
enum Buffer {
    Heap { bytes: BytesMut, max: usize },
    Mapped { mapping: MmapMut, len: usize },
}

impl Buffer {
    fn new(max: usize) -> Self {
        Self::Heap { bytes: BytesMut::new(), max }
    }

    fn len(&self) -> usize {
        match self {
            Self::Heap { bytes, .. } => bytes.len(),
            Self::Mapped { len, .. } => *len,
        }
    }

    /// Appends `data`; the body has then no more than `max` bytes.
    ///
    /// # Errors
    /// The system has no address space for the mapping.
    fn append(&mut self, data: &[u8]) -> Result<(), ApiError> {
        match self {
            Self::Heap { bytes, .. } if bytes.len() + data.len() <= MAPPED_FROM_BYTES => bytes.extend_from_slice(data),
            Self::Heap { bytes, max } => {
                let mut mapping = MmapMut::map_anon(*max).map_err(|_| ApiError::BodyBudget)?;
                mapping[..bytes.len()].copy_from_slice(bytes);
                *self = Self::Mapped { mapping, len: bytes.len() };
                return self.append(data);
            }
            Self::Mapped { mapping, len } => {
                mapping[*len..*len + data.len()].copy_from_slice(data);
                *len += data.len();
            }
        }
        Ok(())
    }

    fn freeze(self) -> Bytes {
        match self {
            Self::Heap { bytes, .. } => bytes.freeze(),
            Self::Mapped { mapping, len } => Bytes::from_owner(mapping).slice(..len),
        }
    }
}

/// Takes this many bytes more from each budget.
fn grow(held: &mut Held, bytes: usize) -> Result<(), ApiError> {
    let bytes = u32::try_from(bytes).map_err(|_| ApiError::BodyBudget)?;
    for permit in held {
        let more = Arc::clone(permit.semaphore()).try_acquire_many_owned(bytes).map_err(|_| ApiError::BodyBudget)?;
        permit.merge(more);
    }
    Ok(())
}

/// Checks that the body is sent as JSON, which browsers send to another site only after a CORS preflight; this server grants none. Forms
/// and plain text need no preflight. A request without a content type needs an Authorization header, which requires a preflight, too.
fn is_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let plain = |value: &[u8]| value.eq_ignore_ascii_case(b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(|value| !plain(value.as_bytes())) {
        return Err(ApiError::ContentEncoding);
    }
    let Some(kind) = headers.get(header::CONTENT_TYPE) else {
        return if headers.contains_key(header::AUTHORIZATION) { Ok(()) } else { Err(ApiError::ContentType) };
    };
    let kind = kind.to_str().unwrap_or_default().to_ascii_lowercase();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json { Ok(()) } else { Err(ApiError::ContentType) }
}

/// Reads the rest of a body without keeping it, within bounds.
pub(super) async fn discard(mut body: Body) {
    let read = async {
        let mut discarded = 0;
        while discarded < DISCARD_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            discarded += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    timeout(DISCARD_TIMEOUT, read).await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use futures::{StreamExt, stream};
    use std::{convert::Infallible, io};

    fn json() -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))])
    }

    /// A body of `chunks` chunks, one every `pause`.
    fn paced(chunks: usize, bytes: usize, pause: Duration) -> Body {
        let chunks = stream::iter(0..chunks).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, Infallible>(Bytes::from(vec![b' '; bytes]))
        });
        Body::from_stream(chunks)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_may_take_long_but_must_not_be_slow() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        let second = Duration::from_secs(1);
        // Half a minute at the least rate.
        let read = bodies.read(None, &json(), paced(30, BYTES_PER_SECOND as usize, second)).await;
        assert_eq!(read.ok().map(|read| read.0.len()), Some(30 * BYTES_PER_SECOND as usize));
        for (bytes, pause, gives_up_s) in [(1, second, 5), (BYTES_PER_SECOND as usize / 2, second, 9), (1 << 19, second * 6, 5)] {
            let since = Instant::now();
            let read = bodies.read(None, &json(), paced(100, bytes, pause)).await;
            assert!(matches!(read, Err(ApiError::BodySlow { .. })), "{bytes} bytes every {pause:?}");
            assert_eq!(since.elapsed().as_secs(), gives_up_s, "{bytes} bytes every {pause:?}");
        }
    }

    #[tokio::test]
    async fn bodies_share_a_budget_and_small_ones_do_not_need_it() {
        let bodies = Bodies::new(1 << 20, 100_000);
        let read = async |bytes: usize| bodies.read(None, &json(), Body::from(vec![b' '; bytes])).await;
        let large = read(UNCOUNTED_BYTES + 80_000).await.expect("it fits");
        assert!(matches!(read(UNCOUNTED_BYTES + 20_001).await, Err(ApiError::BodyBudget)));
        let _small = read(UNCOUNTED_BYTES).await.expect("it needs no budget");
        drop(large);
        assert!(read(UNCOUNTED_BYTES + 100_000).await.is_ok(), "what was held and what was refused is back");
    }

    #[tokio::test]
    async fn incomplete_body_releases_its_budget() {
        let bodies = Bodies::new(1 << 20, 100_000);
        let chunks = [Ok(Bytes::from(vec![b' '; 100_000])), Err(io::Error::from(io::ErrorKind::UnexpectedEof))];
        let read = bodies.read(None, &json(), Body::from_stream(stream::iter(chunks))).await;
        assert!(matches!(read, Err(ApiError::BodyBroken)));
        assert_eq!(bodies.budget.available_permits(), 100_000);
    }

    #[tokio::test]
    async fn large_body_arrives_whole_in_pieces() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        for length in [MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, MAPPED_FROM_BYTES + 1, 1 << 20] {
            let sent: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            for chunk in [1_000, MAPPED_FROM_BYTES, length] {
                let chunks: Vec<_> = sent.chunks(chunk).map(|chunk| Ok::<_, Infallible>(Bytes::copy_from_slice(chunk))).collect();
                let (unannounced, _) =
                    bodies.read(None, &json(), Body::from_stream(stream::iter(chunks))).await.expect("it fits");
                assert!(unannounced == sent, "{length} bytes, {chunk} at a time");
            }
            let (announced, _) = bodies.read(None, &json(), Body::from(sent.clone())).await.expect("it fits");
            assert!(announced == sent, "{length} bytes, announced");
        }
        let chunks = (0..3).map(|_| Ok::<_, Infallible>(Bytes::from(vec![b' '; 400_000])));
        assert!(matches!(
            bodies.read(None, &json(), Body::from_stream(stream::iter(chunks))).await,
            Err(ApiError::BodyTooLarge { .. })
        ));
    }

    #[test]
    fn only_json_that_is_not_encoded_is_read() {
        use header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE};
        for (headers, accepted) in [
            (&[(CONTENT_TYPE, "application/json")][..], true),
            (&[(CONTENT_TYPE, "Application/JSON; charset=utf-8")], true),
            (&[(CONTENT_TYPE, "application/vnd.api+json")], true),
            (&[(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "identity")], true),
            (&[(AUTHORIZATION, "Bearer x")], true),
            (&[], false),
            (&[(CONTENT_TYPE, "text/plain")], false),
            (&[(CONTENT_TYPE, "text/plain"), (AUTHORIZATION, "Bearer x")], false),
            (&[(CONTENT_TYPE, "application/x-www-form-urlencoded")], false),
            (&[(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "gzip")], false),
        ] {
            let map = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
            assert_eq!(is_json(&map).is_ok(), accepted, "{headers:?}");
        }
    }
}
