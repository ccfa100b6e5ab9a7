//! The setters of option structs, of this package and of `uzone-hostpool`: `setters`.

/// Writes functions that take an option struct, set one field of it and return it.
///
/// Each is a line below its documentation: `name(argument: Type) field = value;`. Programs read the functions, not this.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($(
        $(#[$attribute:meta])*
        $name:ident($($argument:ident: $type:ty)?) $field:ident = $value:expr;
    )*) => {$(
        $(#[$attribute])*
        #[must_use]
        pub fn $name(mut self $(, $argument: $type)?) -> Self {
            self.$field = $value;
            self
        }
    )*};
}

pub(crate) use setters;
