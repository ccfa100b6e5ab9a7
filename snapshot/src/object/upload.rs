//! Writing an object that appears when it is whole: [`Upload`].
//!
//! Parts of 8 MiB are sent while the next ones are collected, up to 32 MiB at once; behind 5,000 parts they
//! become larger, because a store takes 10,000. Dropping an [`Upload`] has the store remove the parts; a
//! process that is killed cannot: a rule of the bucket for unfinished uploads removes them.

use std::io;
use std::mem::take;
use std::time::Duration;

use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::store::{Place, failed, runtime, wait};
use crate::source::RequestOptions;

const PART: usize = 8 << 20;
/// How many parts have that size; the others have eight times as much.
const SMALL_PARTS: usize = 5000;
const AT_ONCE: usize = 32 << 20;
/// How long the removal of parts may take.
const REMOVING: Duration = Duration::from_secs(10);

/// An object that is being written.
pub(crate) struct Upload {
    place: Place,
    buffer: Vec<u8>,
    parts: usize,
    upload: Option<Box<dyn MultipartUpload>>,
    sent: JoinSet<object_store::Result<()>>,
}

impl Upload {
    /// Prepares an object; nothing is sent before there is a part.
    pub(crate) fn create(url: &str) -> io::Result<Self> {
        let place = Place::of(url, &RequestOptions::default())?;
        if url.starts_with("http") && place.store.to_string().starts_with("HttpStore") {
            let why = "a web server takes no images: write to s3, gs or az";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        Ok(Self { place, buffer: Vec::new(), parts: 0, upload: None, sent: JoinSet::new() })
    }

    fn part_bytes(&self) -> usize {
        if self.parts < SMALL_PARTS { PART } else { 8 * PART }
    }

    /// Adds bytes, and sends them when there is a part.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let len = bytes.len().min(self.part_bytes() - self.buffer.len());
            self.buffer.extend_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            if self.buffer.len() == self.part_bytes() {
                self.send()?;
            }
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        let mut upload = match self.upload.take() {
            Some(upload) => upload,
            None => {
                let place = self.place.clone();
                wait(async move { place.store.put_multipart(&place.path).await })?
                    .map_err(failed)?
            }
        };
        let part = upload.put_part(PutPayload::from(take(&mut self.buffer)));
        self.upload = Some(upload);
        self.sent.spawn_on(part, runtime()?.handle());
        self.parts += 1;
        let at_once = (AT_ONCE / self.part_bytes()).max(1);
        self.wait_for(at_once - 1)
    }

    /// Waits until so many parts at most are under way.
    fn wait_for(&mut self, left: usize) -> io::Result<()> {
        while self.sent.len() > left {
            let mut sent = take(&mut self.sent);
            let (sent, part) = wait(async move {
                let part = sent.join_next().await;
                (sent, part)
            })?;
            self.sent = sent;
            part.transpose().map_err(io::Error::other)?.transpose().map_err(failed)?;
        }
        Ok(())
    }

    /// Has the object appear.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let place = self.place.clone();
        if self.upload.is_none() {
            let payload = PutPayload::from(take(&mut self.buffer));
            wait(async move { place.store.put(&place.path, payload).await })?.map_err(failed)?;
            return Ok(());
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        self.wait_for(0)?;
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        let (upload, result) = wait(async move {
            let result = upload.complete().await;
            (upload, result)
        })?;
        if result.is_err() {
            // The store removes the parts.
            self.upload = Some(upload);
        }
        result.map(drop).map_err(failed)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let mut sent = take(&mut self.sent);
        let url = self.place.url.clone();
        let removed = wait(async move {
            sent.shutdown().await;
            timeout(REMOVING, upload.abort()).await
        });
        if !matches!(removed, Ok(Ok(Ok(())))) {
            tracing::warn!(url, "parts of an unfinished upload are left in the store");
        }
    }
}
