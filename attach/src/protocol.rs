//! The messages between a program and a page server, on one stream, each a line of JSON.
//!
//! | from | message | descriptors |
//! |---|---|---|
//! | the program | [`Request::Attach`] | none |
//! | the server | [`Reply::Image`] | a memory file, if pages are shared |
//! | the program | an array of [`Region`], as monitors send it | its userfaultfd, and the log of an earlier server |
//! | the server | [`Reply::Served`], again after a restart of the worker | the log |
//!
//! In place of a reply the server may send [`Reply::Refused`], and closes the stream. The end of the stream
//! ends the session. The log states which pages the program has given back; a program that attaches to
//! another server hands it on.

use serde::{Deserialize, Serialize};

/// The version of this protocol.
pub const VERSION: u32 = 1;

/// A request of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "uzone", rename_all = "snake_case")]
pub enum Request {
    /// To have memory filled with the server's image.
    Attach {
        /// [`VERSION`].
        version: u32,
        /// Whether the memory is a mapping of the server's memory file.
        share: bool,
        /// Which image its memory has pages of already: it must be that one.
        image: Option<String>,
        /// Whether the kernel notes which pages it writes to, so that pages are installed protected.
        #[serde(default)]
        tracks: bool,
    },
}

/// An answer of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "uzone", rename_all = "snake_case")]
pub enum Reply {
    /// The image that it serves.
    Image {
        /// The identity of the image.
        image: String,
        /// How many bytes it has.
        len_bytes: u64,
        /// Whether a memory file comes along, which has as many, rounded up to whole pages.
        shares: bool,
    },
    /// Faults are answered from now on; the log of removed pages comes along.
    Served,
    /// The program is not served.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Some memory of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Where it starts.
    pub base_host_virt_addr: u64,
    /// How many bytes it has.
    pub size: u64,
    /// Which byte of the image it starts with.
    pub offset: u64,
    /// How many bytes a page of it has.
    pub page_size: u64,
}
