//! Where the pages of a packed image are: [`ImageMap`].

/// Where the pages of a packed image are, part after part.
#[derive(Clone, Debug, Default)]
pub struct ImageMap {
    /// The name of the image.
    pub name: String,
    /// What there is to say about it: its sizes, its root hash. Sentences without a period at the end.
    pub notes: Vec<String>,
    /// The parts, from the first byte of the image on.
    pub parts: Vec<ImagePart>,
}

/// A part of an image: how many of its pages are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImagePart {
    /// How many bytes it has.
    pub len_bytes: u64,
    /// Pages of zeroes.
    pub zero: u64,
    /// Pages that are stored in this image.
    pub stored: u64,
    /// Pages that are shared: an image below this one has them.
    pub shared: u64,
    /// Pages of the working set, which are of one of the other kinds as well.
    pub working_set: u64,
}
