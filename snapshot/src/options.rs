//! Structs of options whose fields have their defaults and their setters in one place ([`options!`]).

/// Declares a struct of options, with a default and a setter of each. A type in brackets is the argument of the setter,
/// which becomes the field.
macro_rules! options {
    (
        $(#[$about:meta])*
        pub struct $options:ident {
            $($(#[$doc:meta])* $name:ident: $type:ty $([$argument:ty])? = $default:expr,)*
        }
    ) => {
        $(#[$about])*
        pub struct $options {
            $(pub(crate) $name: $type,)*
        }

        impl Default for $options {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl $options {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $name: options!(@argument $type $(, $argument)?)) -> Self {
                    self.$name = $name.into();
                    self
                }
            )*
        }
    };
    (@argument $type:ty) => { $type };
    (@argument $type:ty, $argument:ty) => { $argument };
}

pub(crate) use options;
