//! libcryptsetup 2.6: the functions that are needed, and the only unsafe code of this crate.
//!
//! libcryptsetup keeps the DEK and the stretched KEK in its own locked memory, which it wipes. It never sees
//! the disk, only a [`WorkingCopy`].

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;
use vmseal_secret::SecretBytes;

use crate::error::HeaderError;
use crate::facts::SECTOR_SIZE;
use crate::layout::{COPY_LEN, SLOTS_OFFSET};
use crate::loaded::WorkingCopy;
use crate::metadata::ITERATIONS;

/// How many messages of libcryptsetup an error carries, and how long each may be, in characters.
const MESSAGES_MAX: usize = 4;
const MESSAGE_LEN_MAX: usize = 200;

/// `CRYPT_LOG_ERROR` of libcryptsetup.h.
const LOG_ERROR: c_int = 1;
/// `CRYPT_PBKDF_NO_BENCHMARK`.
const NO_BENCHMARK: u32 = 1 << 1;

/// The cost of trying a passphrase of an exported volume: cryptsetup's passes and lanes, and a quarter of its
/// memory, so that an agent with locked memory and a rescue system can both open it.
const PASSPHRASE_PASSES: u32 = 4;
const PASSPHRASE_MEMORY_KIB: u32 = 256 * 1024;
const PASSPHRASE_LANES: u32 = 4;

/// The least room for key slots that libcryptsetup takes, in bytes, and where data begins after that, in bytes: for headers
/// that get more ([`Device::format`]).
const NARROW_SLOTS_LEN: u64 = 4096;
const NARROW_DATA_OFFSET: u64 = 64 << 10;
const _: () = assert!(SLOTS_OFFSET + NARROW_SLOTS_LEN <= NARROW_DATA_OFFSET);

#[repr(C)]
struct CryptDevice {
    _opaque: [u8; 0],
}

/// `struct crypt_pbkdf_type`.
#[repr(C)]
struct PbkdfType {
    kind: *const c_char,
    hash: *const c_char,
    time_ms: u32,
    iterations: u32,
    max_memory_kb: u32,
    parallel_threads: u32,
    flags: u32,
}

/// `struct crypt_params_luks2`.
#[repr(C)]
struct ParamsLuks2 {
    pbkdf: *const PbkdfType,
    integrity: *const c_char,
    integrity_params: *const c_void,
    data_alignment: usize,
    data_device: *const c_char,
    sector_size: u32,
    label: *const c_char,
    subsystem: *const c_char,
}

type LogFunction = extern "C" fn(c_int, *const c_char, *mut c_void);

#[link(name = "cryptsetup")]
unsafe extern "C" {
    fn crypt_init(device: *mut *mut CryptDevice, path: *const c_char) -> c_int;
    fn crypt_free(device: *mut CryptDevice);
    fn crypt_set_log_callback(device: *mut CryptDevice, log: LogFunction, user: *mut c_void);
    fn crypt_metadata_locking(device: *mut CryptDevice, enable: c_int) -> c_int;
    fn crypt_token_external_disable();
    fn crypt_set_data_offset(device: *mut CryptDevice, sectors: u64) -> c_int;
    fn crypt_set_metadata_size(device: *mut CryptDevice, metadata: u64, slots: u64) -> c_int;
    fn crypt_set_pbkdf_type(device: *mut CryptDevice, pbkdf: *const PbkdfType) -> c_int;
    fn crypt_format(
        device: *mut CryptDevice,
        kind: *const c_char,
        cipher: *const c_char,
        mode: *const c_char,
        uuid: *const c_char,
        key: *const c_char,
        key_len: usize,
        params: *mut c_void,
    ) -> c_int;
    fn crypt_load(device: *mut CryptDevice, kind: *const c_char, params: *mut c_void) -> c_int;
    fn crypt_keyslot_add_by_key(
        device: *mut CryptDevice,
        slot: c_int,
        key: *const c_char,
        key_len: usize,
        passphrase: *const c_char,
        passphrase_len: usize,
        flags: u32,
    ) -> c_int;
    fn crypt_keyslot_destroy(device: *mut CryptDevice, slot: c_int) -> c_int;
    fn crypt_token_json_set(device: *mut CryptDevice, token: c_int, json: *const c_char) -> c_int;
}

/// libcryptsetup's own set-up (random generator, crypto back end) is not thread-safe, and some of its
/// settings are global: one call at a time.
static LIBRARY: Mutex<()> = Mutex::new(());

/// A header area that libcryptsetup has open.
pub(crate) struct Device {
    raw: NonNull<CryptDevice>,
    /// Boxed, as libcryptsetup keeps its address.
    log: Box<RefCell<Vec<String>>>,
    _alone: MutexGuard<'static, ()>,
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made by crypt_init, freed once, before `log` and the lock go.
        unsafe { crypt_free(self.raw.as_ptr()) };
    }
}

/// Collects errors for [`HeaderError::Library`]; libcryptsetup prints nothing when it has a log function.
extern "C" fn keep_message(level: c_int, message: *const c_char, user: *mut c_void) {
    if level != LOG_ERROR || message.is_null() {
        return;
    }
    // SAFETY: `user` is the address of `Device::log`, which lives as long as the device; libcryptsetup
    // calls back on the thread that called it.
    let log = unsafe { &*user.cast::<RefCell<Vec<String>>>() };
    // SAFETY: libcryptsetup passes a string that ends with NUL.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    if let Ok(mut log) = log.try_borrow_mut()
        && log.len() < MESSAGES_MAX
    {
        log.push(message.trim_end().chars().take(MESSAGE_LEN_MAX).collect());
    }
}

fn pbkdf2() -> PbkdfType {
    PbkdfType {
        kind: c"pbkdf2".as_ptr(),
        hash: c"sha256".as_ptr(),
        time_ms: 0,
        iterations: ITERATIONS,
        max_memory_kb: 0,
        parallel_threads: 0,
        flags: NO_BENCHMARK,
    }
}

impl Device {
    fn on(copy: &WorkingCopy) -> Result<Self, HeaderError> {
        let alone = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a NULL device means the global setting; the lock keeps other threads out. Lock files
        // are for devices that others can open, and a memfd is ours alone. No token plug-ins are
        // loaded: a header must not choose which library runs in a process that holds keys.
        unsafe {
            crypt_metadata_locking(ptr::null_mut(), 0);
            crypt_token_external_disable();
        }
        let path = c_string(&copy.path())?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` receives the device, the path is a C string.
        let answer = unsafe { crypt_init(&mut raw, path.as_ptr()) };
        let Some(raw) = NonNull::new(raw).filter(|_| answer >= 0) else {
            return Err(library_error("crypt_init", answer, String::new()));
        };
        let device = Self { raw, log: Box::default(), _alone: alone };
        let user: *const RefCell<Vec<String>> = &*device.log;
        // SAFETY: the box does not move and outlives the raw device; see `keep_message`.
        unsafe { crypt_set_log_callback(raw.as_ptr(), keep_message, user.cast_mut().cast()) };
        Ok(device)
    }

    /// A new header in the working copy, without key slots.
    ///
    /// libcryptsetup fills all room for key slots with random bytes, here 16 MiB, of which nothing would reach a disk. So
    /// it makes the header with little room, and loads it again with all of it.
    pub(crate) fn format(
        copy: &WorkingCopy,
        uuid: Uuid,
        dek: &SecretBytes,
    ) -> Result<Self, HeaderError> {
        drop(Self::format_narrow(copy, uuid, dek)?);
        copy.widen()?;
        Self::load(copy)
    }

    fn format_narrow(
        copy: &WorkingCopy,
        uuid: Uuid,
        dek: &SecretBytes,
    ) -> Result<Self, HeaderError> {
        let device = Self::on(copy)?;
        let uuid = c_string(&uuid.to_string())?;
        let pbkdf = pbkdf2();
        let mut params = ParamsLuks2 {
            pbkdf: &pbkdf,
            integrity: ptr::null(),
            integrity_params: ptr::null(),
            data_alignment: 0,
            data_device: ptr::null(),
            sector_size: SECTOR_SIZE,
            label: ptr::null(),
            subsystem: ptr::null(),
        };
        let raw = device.raw.as_ptr();
        // SAFETY: plain numbers.
        let answer = unsafe { crypt_set_data_offset(raw, NARROW_DATA_OFFSET / 512) };
        device.check("crypt_set_data_offset", answer)?;
        // SAFETY: plain numbers.
        let answer = unsafe { crypt_set_metadata_size(raw, COPY_LEN as u64, NARROW_SLOTS_LEN) };
        device.check("crypt_set_metadata_size", answer)?;
        // SAFETY: all strings end with NUL; key and parameters live until the call is over.
        let answer = unsafe {
            crypt_format(
                raw,
                c"LUKS2".as_ptr(),
                c"aes".as_ptr(),
                c"xts-plain64".as_ptr(),
                uuid.as_ptr(),
                dek.expose().as_ptr().cast(),
                dek.len(),
                (&raw mut params).cast(),
            )
        };
        device.check("crypt_format", answer)?;
        Ok(device)
    }

    /// Slots that are added from now on are for passphrases: argon2id with cryptsetup's parameters.
    pub(crate) fn derive_slowly(&self) -> Result<(), HeaderError> {
        let pbkdf = PbkdfType {
            kind: c"argon2id".as_ptr(),
            hash: c"sha256".as_ptr(),
            time_ms: 0,
            iterations: PASSPHRASE_PASSES,
            max_memory_kb: PASSPHRASE_MEMORY_KIB,
            parallel_threads: PASSPHRASE_LANES,
            flags: NO_BENCHMARK,
        };
        // SAFETY: the parameters are read during the call only.
        let answer = unsafe { crypt_set_pbkdf_type(self.raw.as_ptr(), &pbkdf) };
        self.check("crypt_set_pbkdf_type", answer)
    }

    /// Loads the header in the working copy.
    pub(crate) fn load(copy: &WorkingCopy) -> Result<Self, HeaderError> {
        let device = Self::on(copy)?;
        let raw = device.raw.as_ptr();
        // SAFETY: the type is a C string, no parameters are needed.
        let answer = unsafe { crypt_load(raw, c"LUKS2".as_ptr(), ptr::null_mut()) };
        device.check("crypt_load", answer)?;
        let pbkdf = pbkdf2();
        // SAFETY: the parameters are read during the call only.
        let answer = unsafe { crypt_set_pbkdf_type(raw, &pbkdf) };
        device.check("crypt_set_pbkdf_type", answer)?;
        Ok(device)
    }

    /// Wraps the DEK under the KEK in a free slot.
    pub(crate) fn add_slot(
        &self,
        slot: u32,
        dek: &SecretBytes,
        kek: &SecretBytes,
    ) -> Result<(), HeaderError> {
        // SAFETY: both keys are read during the call only, with their lengths.
        let answer = unsafe {
            crypt_keyslot_add_by_key(
                self.raw.as_ptr(),
                slot as c_int,
                dek.expose().as_ptr().cast(),
                dek.len(),
                kek.expose().as_ptr().cast(),
                kek.len(),
                0,
            )
        };
        self.check("crypt_keyslot_add_by_key", answer)
    }

    /// Removes a slot and its token.
    pub(crate) fn remove_slot(&self, slot: u32) -> Result<(), HeaderError> {
        // SAFETY: no JSON means that the token goes.
        let answer = unsafe { crypt_token_json_set(self.raw.as_ptr(), slot as c_int, ptr::null()) };
        self.check("crypt_token_json_set", answer)?;
        // SAFETY: plain numbers.
        let answer = unsafe { crypt_keyslot_destroy(self.raw.as_ptr(), slot as c_int) };
        self.check("crypt_keyslot_destroy", answer)
    }

    /// Sets the token of a slot; it gets the slot's number.
    pub(crate) fn set_token(&self, slot: u32, json: &str) -> Result<(), HeaderError> {
        let json = c_string(json)?;
        // SAFETY: the JSON is a C string, read during the call only.
        let answer =
            unsafe { crypt_token_json_set(self.raw.as_ptr(), slot as c_int, json.as_ptr()) };
        self.check("crypt_token_json_set", answer)
    }

    fn check(&self, call: &'static str, answer: c_int) -> Result<(), HeaderError> {
        if answer >= 0 {
            return Ok(());
        }
        let messages = self.log.take().iter().map(|message| format!("; {message}")).collect();
        Err(library_error(call, answer, messages))
    }
}

fn library_error(call: &'static str, answer: c_int, messages: String) -> HeaderError {
    HeaderError::Library { call, source: io::Error::from_raw_os_error(-answer), messages }
}

/// None of the texts given to libcryptsetup can hold a NUL but a key id, and JSON escapes that.
fn c_string(text: &str) -> Result<CString, HeaderError> {
    CString::new(text)
        .map_err(|_| library_error("a text with NUL in it", -libc::EINVAL, String::new()))
}
