//! The map of a packed image: [`ImageMap`].

/// The places of pages in a packed image, part after part.
#[derive(Clone, Debug, Default)]
pub struct ImageMap {
    /// The name of the image.
    pub name: String,
    /// Its sizes and its root hash, as sentences without a period.
    pub notes: Vec<String>,
    /// The parts, from the first byte of the image on.
    pub parts: Vec<ImagePart>,
}

/// A part of an image, with its number of pages of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImagePart {
    /// The length of the part.
    pub len_bytes: u64,
    /// Pages of zeroes.
    pub zero: u64,
    /// Pages that are stored in this image.
    pub stored: u64,
    /// Pages that a parent has.
    pub shared: u64,
    /// Pages of the working set; each also counts as one of the other kinds.
    pub working_set: u64,
}
