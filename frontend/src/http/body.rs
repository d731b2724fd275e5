//! Reading bodies within bounds.

use crate::error::ApiError;
use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use std::time::Duration;

/// From the first byte to the last: a client that is slower holds a place others need.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// What is read and thrown away of a body that is refused, so that its sender comes to read the reply.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// The whole body, if it is not longer than `max` and comes in time.
pub(super) async fn read(mut body: Body, max: usize) -> Result<Bytes, ApiError> {
    let read = tokio::time::timeout(BODY_TIMEOUT, collect(&mut body, max)).await;
    let read = read.unwrap_or(Err(ApiError::BodyIncomplete));
    if matches!(read, Err(ApiError::BodyTooLarge { .. })) {
        discard(body).await;
    }
    read
}

async fn collect(body: &mut Body, max: usize) -> Result<Bytes, ApiError> {
    let announced = body.size_hint().lower();
    if announced > max as u64 {
        return Err(ApiError::BodyTooLarge { max });
    }
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::BodyIncomplete)?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() > max {
                return Err(ApiError::BodyTooLarge { max });
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes.freeze())
}

/// Reads on without keeping anything, within bounds.
pub(super) async fn discard(mut body: Body) {
    let read = async {
        let mut discarded = 0;
        while discarded < DISCARD_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            discarded += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    tokio::time::timeout(DISCARD_TIMEOUT, read).await.ok();
}
