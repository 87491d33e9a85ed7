//! The one macro that makes a table of C functions.

/// A struct with one pointer for each function, and a method for each that calls it.
///
/// A line reads `cuMemGetInfo = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);`: the name in the
/// documentation, the symbol in the library, the arguments. All functions return a C `int` that is 0 for success. A
/// method makes a `Failure` of any other, and of a function that the library does not have.
macro_rules! functions {
    ($(#[$doc:meta])* struct $table:ident, $failure:ty;
     $($name:ident = $symbol:literal ( $($argument:ident: $type:ty),* $(,)? );)*) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        struct $table {
            $($name: Option<unsafe extern "C" fn($($type),*) -> std::ffi::c_int>,)*
        }

        impl $table {
            /// Looks up every function; calls of a missing one fail.
            fn new(library: &$crate::Loaded) -> Self {
                Self {
                    $(
                        // SAFETY: the line of the table was copied from the library's public header.
                        $name: unsafe { library.function($symbol) },
                    )*
                }
            }
        }

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl $table {
            $(
                unsafe fn $name(&self $(, $argument: $type)*) -> std::result::Result<(), $failure> {
                    let Some(function) = self.$name else {
                        return Err(<$failure>::missing_symbol(stringify!($name), $symbol));
                    };
                    // SAFETY: the signature is the header's, and the caller keeps what the documentation of the
                    // function asks for.
                    let code = unsafe { function($($argument),*) };
                    if code == 0 { Ok(()) } else { Err(self.failure(stringify!($name), code)) }
                }
            )*
        }
    };
}

pub(crate) use functions;
