//! The one macro that makes a table of C functions, and what their calls have in common.

use std::ffi::{c_char, c_int};

/// A struct with one pointer for each function, and a method for each that calls it.
///
/// A line reads `cuMemGetInfo = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);`: the name in the
/// documentation, the symbol in the library where that is another, the arguments. A function returns what the line says
/// after `->`, or else a C `int` that is 0 for success. A method makes a `Failure` of any other `int`, by the table's own
/// method `failure`, and of a function that the library does not have.
macro_rules! functions {
    (@symbol $name:ident) => { stringify!($name) };
    (@symbol $name:ident $symbol:literal) => { $symbol };
    (@type) => { std::ffi::c_int };
    (@type $answer:ty) => { $answer };
    (@result) => { () };
    (@result $answer:ty) => { $answer };
    (@checked $table:ident, $name:ident, $code:ident) => {
        if $code == 0 { Ok(()) } else { Err($table.failure(stringify!($name), $code)) }
    };
    (@checked $table:ident, $name:ident, $given:ident, $answer:ty) => { Ok($given) };
    ($(#[$doc:meta])* struct $table:ident, $failure:ty;
     $($name:ident $(= $symbol:literal)? ( $($argument:ident: $type:ty),* $(,)? ) $(-> $answer:ty)?;)*) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        struct $table {
            library: $crate::Loaded,
            $($name: Option<unsafe extern "C" fn($($type),*) -> functions!(@type $($answer)?)>,)*
        }

        impl $table {
            /// Looks up every function; calls of a missing one fail.
            fn new(library: $crate::Loaded) -> Self {
                Self {
                    $(
                        // SAFETY: the line of the table was copied from the library's public header.
                        $name: unsafe { library.function(functions!(@symbol $name $($symbol)?)) },
                    )*
                    library,
                }
            }

            /// The functions that are not there.
            #[allow(dead_code, reason = "asked of NVSHMEM alone")]
            fn missing(&self) -> Vec<&'static str> {
                let all = [$((stringify!($name), self.$name.is_some()),)*];
                all.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.library.fmt(f)
            }
        }

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl $table {
            $(
                unsafe fn $name(
                    &self $(, $argument: $type)*
                ) -> std::result::Result<functions!(@result $($answer)?), $failure> {
                    let Some(function) = self.$name else {
                        let symbol = functions!(@symbol $name $($symbol)?);
                        return Err(<$failure>::missing_symbol(stringify!($name), symbol));
                    };
                    // SAFETY: the signature is the header's, and the caller keeps what the documentation of the
                    // function asks for.
                    let given = unsafe { function($($argument),*) };
                    functions!(@checked self, $name, given $(, $answer)?)
                }
            )*
        }
    };
}

pub(crate) use functions;

/// Methods that do nothing but call a function of the table `self.c`.
///
/// A line reads `unsafe fn release(memory: Memory) = cuMemRelease(memory.raw());`: the method, the function, what that gets.
/// Where the function writes its answer, the line names what it writes to. What is made of an answer comes last:
/// `fn retain(address: u64) -> Memory = |handle| cuMemRetainAllocationHandle(handle, address) => Memory::new;`. Before that
/// may come the library's first version with the function, `since SIGNALS`, for the table's `self.needs`. The comment above
/// a line, or what its documentation asks of the caller, says why the call is sound.
macro_rules! methods {
    (@call $this:ident $function:ident($($given:expr),*)) => {
        // SAFETY: as the line says.
        unsafe { $this.c.$function($($given),*) }
    };
    (@call $this:ident |$written:ident| $function:ident($($given:expr),*)) => {
        // SAFETY: as the line says.
        $crate::table::written(|$written| unsafe { $this.c.$function($($given),*) })
    };
    ($(
        $(#[$attribute:meta])*
        $($word:ident)+ ($($argument:ident: $type:ty),* $(,)?) $(-> $answer:ty)? =
            $(|$written:ident|)? $function:ident($($given:expr),* $(,)?)
            $(since $version:expr)? $(=> $made:expr)?;
    )*) => {$(
        $(#[$attribute])*
        $($word)+ (
            &self $(, $argument: $type)*
        ) -> Result<$crate::table::functions!(@result $($answer)?)> {
            $(self.needs(stringify!($function), $version)?;)?
            $crate::table::methods!(@call self $(|$written|)? $function($($given),*))$(.map($made))?
        }
    )*};
}

pub(crate) use methods;

/// Types of handles: the values by which a driver or a library, `$of`, names what it has made.
macro_rules! handles {
    ($of:literal: $($(#[$doc:meta])* $name:ident($raw:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name($raw);

        impl $name {
            #[doc = concat!("The handle that somebody else has obtained from the same ", $of, ".")]
            ///
            /// # Safety
            ///
            /// It is live, of this kind, and stays so while it is in use.
            pub const unsafe fn from_raw(raw: $raw) -> Self {
                Self(raw)
            }

            #[doc = concat!("The handle that the ", $of, " has just given.")]
            pub(super) const fn new(raw: $raw) -> Self {
                Self(raw)
            }

            #[doc = concat!("The ", $of, "'s own value.")]
            pub const fn raw(self) -> $raw {
                self.0
            }
        }
    )*};
}

pub(crate) use handles;

/// A number of things, as C has it.
pub(crate) fn number(count: c_int) -> usize {
    usize::try_from(count).unwrap_or(0)
}

/// An address, where the library gave one.
pub(crate) fn given(address: u64) -> Option<u64> {
    (address != 0).then_some(address)
}

/// What `call` writes, which is zero before.
pub(crate) fn written<T: Default, E>(call: impl FnOnce(&mut T) -> Result<(), E>) -> Result<T, E> {
    let mut value = T::default();
    call(&mut value).map(|()| value)
}

/// The text that `call` writes, of at most `N` bytes.
pub(crate) fn written_text<const N: usize, E>(
    call: impl FnOnce(*mut c_char) -> Result<(), E>,
) -> Result<String, E> {
    let mut buffer = [0_u8; N];
    call(buffer.as_mut_ptr().cast()).map(|()| text(&buffer))
}

/// The text in a buffer, up to the first zero.
pub(crate) fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}
