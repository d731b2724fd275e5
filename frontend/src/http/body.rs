//! Reads request bodies within bounds of size, speed and memory.
//!
//! A body is read before the request reserves sequences, so a slow or huge body uses only the memory of the bytes that have arrived.
//! The limit on connections also limits the number of bodies.

use crate::{admission::Client, error::ApiError, metrics::Endpoint, shares::Shares};
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

/// The minimum speed at which a body must arrive, so that many slow requests cannot use up all connections. Any real network is faster.
const BYTES_PER_SECOND: u32 = 16 << 10;
/// The maximum time without a byte of a body, and the maximum delay of a body behind [`BYTES_PER_SECOND`]. A few lost packets cause a
/// shorter delay.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The first bytes of each body do not count towards the budget, so that ordinary requests are read while large requests use up the budget.
/// With 8,192 connections, the uncounted bytes use 128 MiB at most.
const UNCOUNTED_BYTES: usize = 16 << 10;
/// A body that grows beyond this size is moved from the heap to a memory mapping.
const MAPPED_FROM_BYTES: usize = 256 << 10;
/// The maximum number of bytes of a refused body that are read and discarded.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum size of a form, in bytes, unless that of all bodies is greater: 25 MiB for audio, as OpenAI and vLLM allow, and 1 MiB for
/// the other fields.
const FORM_BYTES_MAX: usize = 26 << 20;

/// The beginning of a form's content type. The boundary between its fields follows.
const MULTIPART: &[u8] = b"multipart/form-data;";

/// How a request's body is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyForm {
    Json,
    /// `multipart/form-data`.
    Multipart,
}

impl BodyForm {
    /// Returns how the bodies of this endpoint's requests are written.
    pub(super) fn of(endpoint: Endpoint) -> Self {
        if matches!(endpoint, Endpoint::Transcriptions | Endpoint::Translations) { Self::Multipart } else { Self::Json }
    }
}

/// Reads the bodies of all requests, with a common memory budget.
pub(super) struct Bodies {
    max: usize,
    /// The maximum size of a form.
    form_max: usize,
    budget: Arc<Semaphore>,
    /// Each client's share, which is half of the budget.
    shares: Shares<Client>,
}

/// The permits for a body's bytes, from the client's share and from the whole budget. Dropping them releases the bytes.
pub(super) type HeldBytes = Vec<OwnedSemaphorePermit>;

impl Bodies {
    /// `max` is the maximum size of one body. `budget` is the maximum total size of all bodies that are read or parsed at a time. Both are
    /// in bytes.
    pub(super) fn new(max: usize, budget: usize) -> Self {
        let share = budget.div_ceil(2);
        let (shares, form_max) = (Shares::new(share), max.max(FORM_BYTES_MAX.min(share)));
        Self { max, form_max, budget: Arc::new(Semaphore::new(budget.min(Semaphore::MAX_PERMITS))), shares }
    }

    /// Reads a request's whole body. The body counts towards this client's share of the budget.
    ///
    /// # Errors
    /// The body is too large, too slow, incomplete or not plainly written in this form, or the budget is used up. If more of the body may
    /// arrive, it is read and discarded, within bounds, because a client reads the reply only after it has sent its request.
    pub(super) async fn read(
        &self,
        form: BodyForm,
        client: Option<&Client>,
        headers: &HeaderMap,
        mut body: Body,
    ) -> Result<(Bytes, HeldBytes), ApiError> {
        let read = match check_type(form, headers) {
            Ok(()) => self.collect(form, client, &mut body).await,
            Err(error) => Err(error),
        };
        if !matches!(read, Ok(_) | Err(ApiError::BodySlow { .. } | ApiError::BodyBroken)) {
            discard(body).await;
        }
        read
    }

    /// Reads a body as [`Bodies::read`] does, but leaves the rest of a refused body.
    ///
    /// # Errors
    /// The body is too large, too slow or incomplete, or the budget is used up.
    pub(super) async fn collect(
        &self,
        form: BodyForm,
        client: Option<&Client>,
        body: &mut Body,
    ) -> Result<(Bytes, HeldBytes), ApiError> {
        let max = if form == BodyForm::Json { self.max } else { self.form_max };
        let too_large = ApiError::BodyTooLarge { max };
        if body.size_hint().lower() > max as u64 {
            return Err(too_large);
        }
        let budgets = client.map(|client| self.shares.of(client)).into_iter().chain([Arc::clone(&self.budget)]);
        let held = budgets.map(|budget| budget.try_acquire_many_owned(0).map_err(|_| ApiError::BodyBudget));
        let mut held = held.collect::<Result<HeldBytes, _>>()?;
        // If the client announces no length, the mapping has the maximum size of a body.
        let announced = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
        let max = announced.map_or(max, |announced| announced.min(max));
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
/// returns it to the system at once. With heap buffers, 50 clients that each sent 32 MiB left the process with twice the budget in use.
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

    /// Appends `data`. The caller has checked that the body then has at most `max` bytes.
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

/// Acquires permits for this many more bytes from each semaphore in `held`, which are the client's share and the whole budget.
fn grow(held: &mut HeldBytes, bytes: usize) -> Result<(), ApiError> {
    let bytes = u32::try_from(bytes).map_err(|_| ApiError::BodyBudget)?;
    for permit in held {
        let more = Arc::clone(permit.semaphore()).try_acquire_many_owned(bytes).map_err(|_| ApiError::BodyBudget)?;
        permit.merge(more);
    }
    Ok(())
}

/// Checks that the content type is that of the form. Browsers send JSON to another site only after a CORS preflight, which this server
/// refuses, but they send forms and plain text without a preflight; then only `http/guard` refuses them. A request without a content type
/// needs an Authorization header, which also needs a preflight.
pub(super) fn check_type(form: BodyForm, headers: &HeaderMap) -> Result<(), ApiError> {
    let plain = |value: &[u8]| value.eq_ignore_ascii_case(b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(|value| !plain(value.as_bytes())) {
        return Err(ApiError::ContentEncoding);
    }
    let kind = headers.get(header::CONTENT_TYPE);
    if form == BodyForm::Multipart {
        let kind = kind.and_then(|kind| kind.as_bytes().get(..MULTIPART.len()));
        return if kind.is_some_and(|kind| kind.eq_ignore_ascii_case(MULTIPART)) { Ok(()) } else { Err(ApiError::FormType) };
    }
    let Some(kind) = kind else {
        return if headers.contains_key(header::AUTHORIZATION) { Ok(()) } else { Err(ApiError::ContentType) };
    };
    let kind = kind.to_str().unwrap_or_default().to_ascii_lowercase();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json { Ok(()) } else { Err(ApiError::ContentType) }
}

/// Reads and discards the rest of a body, within bounds of size and time.
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

    /// Returns a body of `chunks` chunks of `bytes` bytes each, with a `pause` before each chunk.
    fn paced(chunks: usize, bytes: usize, pause: Duration) -> Body {
        let chunks = stream::iter(0..chunks).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok::<_, Infallible>(Bytes::from(vec![b' '; bytes]))
        });
        Body::from_stream(chunks)
    }

    #[tokio::test(start_paused = true)]
    async fn body_that_is_slow_or_stalls_is_refused() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        let second = Duration::from_secs(1);
        // The body arrives for half a minute at the minimum speed.
        let read = bodies.read(BodyForm::Json, None, &json(), paced(30, BYTES_PER_SECOND as usize, second)).await;
        assert_eq!(read.ok().map(|read| read.0.len()), Some(30 * BYTES_PER_SECOND as usize));
        for (bytes, pause, gives_up_s) in [(1, second, 5), (BYTES_PER_SECOND as usize / 2, second, 9), (1 << 19, second * 6, 5)] {
            let since = Instant::now();
            let read = bodies.read(BodyForm::Json, None, &json(), paced(100, bytes, pause)).await;
            assert!(matches!(read, Err(ApiError::BodySlow { .. })), "{bytes} bytes every {pause:?}");
            assert_eq!(since.elapsed().as_secs(), gives_up_s, "{bytes} bytes every {pause:?}");
        }
    }

    #[tokio::test]
    async fn large_bodies_share_a_budget_that_small_bodies_do_not_need() {
        let bodies = Bodies::new(1 << 20, 100_000);
        let read = async |bytes: usize| bodies.read(BodyForm::Json, None, &json(), Body::from(vec![b' '; bytes])).await;
        let large = read(UNCOUNTED_BYTES + 80_000).await.expect("the body fits in the budget");
        assert!(matches!(read(UNCOUNTED_BYTES + 20_001).await, Err(ApiError::BodyBudget)));
        let _small = read(UNCOUNTED_BYTES).await.expect("a small body needs no budget");
        drop(large);
        assert!(read(UNCOUNTED_BYTES + 100_000).await.is_ok(), "the whole budget is available again");
    }

    #[tokio::test]
    async fn incomplete_body_releases_its_budget() {
        let bodies = Bodies::new(1 << 20, 100_000);
        let chunks = [Ok(Bytes::from(vec![b' '; 100_000])), Err(io::Error::from(io::ErrorKind::UnexpectedEof))];
        let read = bodies.read(BodyForm::Json, None, &json(), Body::from_stream(stream::iter(chunks))).await;
        assert!(matches!(read, Err(ApiError::BodyBroken)));
        assert_eq!(bodies.budget.available_permits(), 100_000);
    }

    #[tokio::test]
    async fn large_body_is_read_completely_from_chunks_of_any_size() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        for length in [MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, MAPPED_FROM_BYTES + 1, 1 << 20] {
            let sent: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            for chunk in [1_000, MAPPED_FROM_BYTES, length] {
                let chunks: Vec<_> = sent.chunks(chunk).map(|chunk| Ok::<_, Infallible>(Bytes::copy_from_slice(chunk))).collect();
                let (unannounced, _) = bodies
                    .read(BodyForm::Json, None, &json(), Body::from_stream(stream::iter(chunks)))
                    .await
                    .expect("the body fits in the budget");
                assert!(unannounced == sent, "{length} bytes, {chunk} at a time");
            }
            let (announced, _) =
                bodies.read(BodyForm::Json, None, &json(), Body::from(sent.clone())).await.expect("the body fits in the budget");
            assert!(announced == sent, "{length} bytes, announced");
        }
        let chunks = (0..3).map(|_| Ok::<_, Infallible>(Bytes::from(vec![b' '; 400_000])));
        assert!(matches!(
            bodies.read(BodyForm::Json, None, &json(), Body::from_stream(stream::iter(chunks))).await,
            Err(ApiError::BodyTooLarge { .. })
        ));
    }

    #[test]
    fn only_json_without_content_encoding_is_accepted() {
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
            assert_eq!(check_type(BodyForm::Json, &map).is_ok(), accepted, "{headers:?}");
        }
    }
}
