//! The functions of librados and librbd that this crate uses. The libraries (LGPL) are loaded when the program starts, so
//! it is built, and `vmseal` installed, without them.
//!
//! Signatures: `rados/librados.h` and `rbd/librbd.h` of Ceph 16; they are the same in Ceph 18. Handles are opaque. Functions return a
//! negative error number where they fail.

use std::ffi::{c_char, c_int, c_uchar, c_void};
use std::sync::OnceLock;

use libc::{iovec, size_t, ssize_t, time_t, timeval};
use libloading::Library;

/// A connection to a cluster (`rados_t`).
pub type Rados = *mut c_void;
/// A pool, or a namespace of one (`rados_ioctx_t`).
pub type IoContext = *mut c_void;
/// Changes to one object, done as one (`rados_write_op_t`).
pub type WriteOperation = *mut c_void;
/// Reads of one object (`rados_read_op_t`).
pub type ReadOperation = *mut c_void;
/// A list of keys and values (`rados_omap_iter_t`).
pub type KeyIterator = *mut c_void;
/// An open image (`rbd_image_t`).
pub type Image = *mut c_void;
/// What a new image is to be like (`rbd_image_options_t`).
pub type ImageOptions = *mut c_void;
/// An operation in flight (`rbd_completion_t`, `rados_completion_t`).
pub type Completion = *mut c_void;

/// Called by a thread of the library when an operation is done (`rbd_callback_t`, `rados_callback_t`).
pub type WhenDone = extern "C" fn(Completion, *mut c_void);
/// Called for each extent of an image.
pub type OnExtent = extern "C" fn(u64, size_t, c_int, *mut c_void) -> c_int;

/// Who has an image open to be written (`rbd_image_watcher_t`).
#[repr(C)]
pub struct Watcher {
    /// The address, which is given back to the library.
    pub address: *mut c_char,
    /// The number that the cluster has given the client.
    pub client: i64,
    /// Which of the client's handles.
    pub cookie: u64,
}

/// `LIBRADOS_CREATE_IDEMPOTENT`: the object may be there.
pub const CREATE_IDEMPOTENT: c_int = 0;
/// `LIBRADOS_OPERATION_NOFLAG`.
pub const NO_FLAGS: c_int = 0;
/// `LIBRADOS_OPERATION_FULL_TRY`: a change that a full pool does not take fails (ENOSPC, EDQUOT), and does not wait for room.
pub const OPERATION_FULL_TRY: c_int = 64;
/// `LIBRADOS_CMPXATTR_OP_EQ`.
pub const COMPARE_EQUAL: u8 = 1;
/// `LIBRADOS_LOCK_FLAG_MAY_RENEW`: a lock that the caller has is renewed.
pub const LOCK_MAY_RENEW: u8 = 1;
/// `RBD_IMAGE_OPTION_FEATURES`.
pub const IMAGE_OPTION_FEATURES: c_int = 1;
/// `RBD_IMAGE_OPTION_ORDER`: the size of objects, as a power of two.
pub const IMAGE_OPTION_ORDER: c_int = 2;
/// `RBD_IMAGE_OPTION_STRIPE_UNIT`, in bytes.
pub const IMAGE_OPTION_STRIPE_UNIT: c_int = 3;
/// `RBD_IMAGE_OPTION_STRIPE_COUNT`.
pub const IMAGE_OPTION_STRIPE_COUNT: c_int = 4;
/// `RBD_IMAGE_OPTION_DATA_POOL`.
pub const IMAGE_OPTION_DATA_POOL: c_int = 10;
/// `RBD_FEATURE_LAYERING`, `_EXCLUSIVE_LOCK`, `_OBJECT_MAP`, `_FAST_DIFF`, `_DEEP_FLATTEN`: what `rbd create` gives an image.
pub const FEATURES: u64 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`: nobody writes to an image without its lock.
pub const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_FEATURE_STRIPINGV2`: units of an image go around several objects.
pub const FEATURE_STRIPING: u64 = 1 << 1;
/// `RBD_FEATURE_OBJECT_MAP`, `_FAST_DIFF`: an image has a map of the objects that exist.
pub const FEATURES_OF_MAP: u64 = 1 << 3 | 1 << 4;
/// `RBD_FLAG_OBJECT_MAP_INVALID`, `RBD_FLAG_FAST_DIFF_INVALID`: the map is not right.
pub const FLAGS_OF_WRONG_MAP: u64 = 1 << 0 | 1 << 1;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the zeroes take room.
pub const ZEROES_TAKE_ROOM: c_int = 1;

/// Why Ceph cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{library} cannot be loaded: {error}. On Debian: apt install {package}")]
pub struct LoadError {
    library: &'static str,
    package: &'static str,
    error: libloading::Error,
}

macro_rules! functions {
    ($(#[$about:meta])* $table:ident of $library:literal in $package:literal {
        $(fn $name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*
    }) => {
        $(#[$about])*
        #[allow(missing_docs)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: Library,
        }

        impl $table {
            fn load() -> Result<Self, LoadError> {
                let failed = |error| LoadError { library: $library, package: $package, error };
                // SAFETY: Ceph's libraries start no thread and change nothing when they are loaded.
                let library = unsafe { Library::new($library) }.map_err(failed)?;
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the signature is that of the header, and the library stays loaded with the table.
                        *unsafe { library.get(name) }.map_err(failed)?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    /// librados.
    Librados of "librados.so.2" in "librados2" {
        fn rados_create2(*mut Rados, *const c_char, *const c_char, u64) -> c_int;
        fn rados_conf_set(Rados, *const c_char, *const c_char) -> c_int;
        fn rados_conf_get(Rados, *const c_char, *mut c_char, size_t) -> c_int;
        fn rados_connect(Rados) -> c_int;
        fn rados_shutdown(Rados);
        fn rados_cluster_fsid(Rados, *mut c_char, size_t) -> c_int;
        fn rados_getaddrs(Rados, *mut *mut c_char) -> c_int;
        fn rados_get_instance_id(Rados) -> u64;
        fn rados_mon_command(
            Rados, *mut *const c_char, size_t, *const c_char, size_t,
            *mut *mut c_char, *mut size_t, *mut *mut c_char, *mut size_t,
        ) -> c_int;
        fn rados_buffer_free(*mut c_char);
        fn rados_ioctx_create(Rados, *const c_char, *mut IoContext) -> c_int;
        fn rados_ioctx_set_namespace(IoContext, *const c_char);
        fn rados_ioctx_destroy(IoContext);
        fn rados_read(IoContext, *const c_char, *mut c_char, size_t, u64) -> c_int;
        fn rados_write(IoContext, *const c_char, *const c_char, size_t, u64) -> c_int;
        fn rados_trunc(IoContext, *const c_char, u64) -> c_int;
        fn rados_stat(IoContext, *const c_char, *mut u64, *mut time_t) -> c_int;
        fn rados_remove(IoContext, *const c_char) -> c_int;
        fn rados_aio_create_completion2(*mut c_void, Option<WhenDone>, *mut Completion) -> c_int;
        fn rados_aio_stat(IoContext, *const c_char, Completion, *mut u64, *mut time_t) -> c_int;
        fn rados_aio_wait_for_complete(Completion) -> c_int;
        fn rados_aio_get_return_value(Completion) -> c_int;
        fn rados_aio_get_version(Completion) -> u64;
        fn rados_aio_release(Completion);
        fn rados_getxattr(IoContext, *const c_char, *const c_char, *mut c_char, size_t) -> c_int;
        fn rados_lock_exclusive(
            IoContext, *const c_char, *const c_char, *const c_char, *const c_char, *mut timeval, u8,
        ) -> c_int;
        fn rados_lock_shared(
            IoContext, *const c_char, *const c_char, *const c_char, *const c_char, *const c_char,
            *mut timeval, u8,
        ) -> c_int;
        fn rados_unlock(IoContext, *const c_char, *const c_char, *const c_char) -> c_int;
        fn rados_break_lock(
            IoContext, *const c_char, *const c_char, *const c_char, *const c_char,
        ) -> c_int;
        fn rados_list_lockers(
            IoContext, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut size_t,
            *mut c_char, *mut size_t, *mut c_char, *mut size_t, *mut c_char, *mut size_t,
        ) -> ssize_t;
        fn rados_create_write_op() -> WriteOperation;
        fn rados_release_write_op(WriteOperation);
        fn rados_write_op_operate(WriteOperation, IoContext, *const c_char, *mut time_t, c_int) -> c_int;
        fn rados_write_op_create(WriteOperation, c_int, *const c_char);
        fn rados_write_op_remove(WriteOperation);
        fn rados_write_op_setxattr(WriteOperation, *const c_char, *const c_char, size_t);
        fn rados_write_op_omap_set(
            WriteOperation, *const *const c_char, *const *const c_char, *const size_t, size_t,
        );
        fn rados_write_op_omap_rm_keys(WriteOperation, *const *const c_char, size_t);
        fn rados_write_op_omap_cmp(
            WriteOperation, *const c_char, u8, *const c_char, size_t, *mut c_int,
        );
        fn rados_create_read_op() -> ReadOperation;
        fn rados_release_read_op(ReadOperation);
        fn rados_read_op_operate(ReadOperation, IoContext, *const c_char, c_int) -> c_int;
        fn rados_read_op_omap_get_vals2(
            ReadOperation, *const c_char, *const c_char, u64, *mut KeyIterator, *mut c_uchar, *mut c_int,
        );
        fn rados_read_op_omap_get_vals_by_keys(
            ReadOperation, *const *const c_char, size_t, *mut KeyIterator, *mut c_int,
        );
        fn rados_omap_get_next(
            KeyIterator, *mut *mut c_char, *mut *mut c_char, *mut size_t,
        ) -> c_int;
        fn rados_omap_get_end(KeyIterator);
    }
}

functions! {
    /// librbd.
    Librbd of "librbd.so.1" in "librbd1" {
        fn rbd_image_options_create(*mut ImageOptions);
        fn rbd_image_options_destroy(ImageOptions);
        fn rbd_image_options_set_uint64(ImageOptions, c_int, u64) -> c_int;
        fn rbd_image_options_set_string(ImageOptions, c_int, *const c_char) -> c_int;
        fn rbd_create4(IoContext, *const c_char, u64, ImageOptions) -> c_int;
        fn rbd_remove(IoContext, *const c_char) -> c_int;
        fn rbd_open(IoContext, *const c_char, *mut Image, *const c_char) -> c_int;
        fn rbd_open_read_only(IoContext, *const c_char, *mut Image, *const c_char) -> c_int;
        fn rbd_close(Image) -> c_int;
        fn rbd_get_id(Image, *mut c_char, size_t) -> c_int;
        fn rbd_get_size(Image, *mut u64) -> c_int;
        fn rbd_get_stripe_count(Image, *mut u64) -> c_int;
        fn rbd_get_stripe_unit(Image, *mut u64) -> c_int;
        fn rbd_get_features(Image, *mut u64) -> c_int;
        fn rbd_get_flags(Image, *mut u64) -> c_int;
        fn rbd_resize(Image, u64) -> c_int;
        fn rbd_metadata_get(Image, *const c_char, *mut c_char, *mut size_t) -> c_int;
        fn rbd_metadata_set(Image, *const c_char, *const c_char) -> c_int;
        fn rbd_metadata_remove(Image, *const c_char) -> c_int;
        fn rbd_write(Image, u64, size_t, *const c_char) -> ssize_t;
        fn rbd_flush(Image) -> c_int;
        fn rbd_aio_create_completion(*mut c_void, WhenDone, *mut Completion) -> c_int;
        fn rbd_aio_get_return_value(Completion) -> ssize_t;
        fn rbd_aio_release(Completion);
        fn rbd_aio_read(Image, u64, size_t, *mut c_char, Completion) -> c_int;
        fn rbd_aio_write(Image, u64, size_t, *const c_char, Completion) -> c_int;
        fn rbd_aio_readv(Image, *const iovec, c_int, u64, Completion) -> c_int;
        fn rbd_aio_writev(Image, *const iovec, c_int, u64, Completion) -> c_int;
        fn rbd_aio_flush(Image, Completion) -> c_int;
        fn rbd_aio_write_zeroes(Image, u64, size_t, Completion, c_int, c_int) -> c_int;
        fn rbd_diff_iterate2(
            Image, *const c_char, u64, u64, u8, u8, OnExtent, *mut c_void,
        ) -> c_int;
        fn rbd_lock_acquire(Image, c_int) -> c_int;
        fn rbd_lock_get_owners(Image, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
        fn rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
        fn rbd_lock_break(Image, c_int, *const c_char) -> c_int;
        fn rbd_watchers_list(Image, *mut Watcher, *mut size_t) -> c_int;
        fn rbd_watchers_list_cleanup(*mut Watcher, size_t);
    }
}

/// Both libraries.
pub struct Libraries {
    /// librados.
    pub rados: Librados,
    /// librbd.
    pub rbd: Librbd,
}

static LIBRARIES: OnceLock<Libraries> = OnceLock::new();

/// Loads the libraries, once.
///
/// # Errors
/// One is not installed, or too old.
pub fn load() -> Result<&'static Libraries, LoadError> {
    if let Some(loaded) = LIBRARIES.get() {
        return Ok(loaded);
    }
    let libraries = Libraries { rados: Librados::load()?, rbd: Librbd::load()? };
    Ok(LIBRARIES.get_or_init(|| libraries))
}

/// The libraries: of something that only they make, so they are loaded.
#[must_use]
pub fn loaded() -> &'static Libraries {
    LIBRARIES.get().expect("Ceph's libraries are loaded before anything of theirs is made")
}
