//! Enumerations of the protocol (KMIP 1.4 specification, section 9.1.3.2), as far as vmseal uses them.

use std::fmt;

macro_rules! enumeration {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $name:ident = $number:literal, $words:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type {
            $($(#[$variant_doc])* $name,)*
            /// A value that this crate has no name for.
            Other(u32),
        }

        impl $type {
            /// Its number in the protocol.
            #[must_use]
            pub fn number(self) -> u32 {
                match self {
                    $(Self::$name => $number,)*
                    Self::Other(number) => number,
                }
            }

            /// The value of a number.
            #[must_use]
            pub fn from_number(number: u32) -> Self {
                match number {
                    $($number => Self::$name,)*
                    other => Self::Other(other),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name => f.write_str($words),)*
                    Self::Other(number) => write!(f, "{number:#x}"),
                }
            }
        }
    };
}

enumeration! {
    /// An operation of a server (section 9.1.3.2.27).
    OperationCode {
        /// Create a key.
        Create = 0x01, "Create";
        /// Find objects by attributes.
        Locate = 0x08, "Locate";
        /// Read an object, with its key.
        Get = 0x0a, "Get";
        /// Read attributes.
        GetAttributes = 0x0b, "GetAttributes";
        /// Add an attribute.
        AddAttribute = 0x0d, "AddAttribute";
        /// Put a key to use.
        Activate = 0x12, "Activate";
        /// Take a key out of use.
        Revoke = 0x13, "Revoke";
        /// Destroy an object.
        Destroy = 0x14, "Destroy";
        /// Ask for the server's description and operations.
        Query = 0x18, "Query";
        /// Ask which versions the server speaks (from 1.1).
        DiscoverVersions = 0x1e, "DiscoverVersions";
    }
}

enumeration! {
    /// Why a server refuses (section 9.1.3.2.29; section 11 says when).
    ResultReason {
        /// No such object for this client; at some servers also a destroyed one.
        ItemNotFound = 0x01, "ItemNotFound";
        /// The answer is longer than the client accepts.
        ResponseTooLarge = 0x02, "ResponseTooLarge";
        /// The client could not be authenticated.
        AuthenticationNotSuccessful = 0x03, "AuthenticationNotSuccessful";
        /// The server does not understand the message, or does not speak its version.
        InvalidMessage = 0x04, "InvalidMessage";
        /// The server does not know the operation.
        OperationNotSupported = 0x05, "OperationNotSupported";
        /// Something is missing in the request.
        MissingData = 0x06, "MissingData";
        /// Something in the request is wrong.
        InvalidField = 0x07, "InvalidField";
        /// An optional feature that the server does not have.
        FeatureNotSupported = 0x08, "FeatureNotSupported";
        /// Cancelled.
        OperationCanceledByRequester = 0x09, "OperationCanceledByRequester";
        /// The server's cryptography failed.
        CryptographicFailure = 0x0a, "CryptographicFailure";
        /// Not allowed for this object.
        IllegalOperation = 0x0b, "IllegalOperation";
        /// Not allowed for this client, or in the object's state.
        PermissionDenied = 0x0c, "PermissionDenied";
        /// The object must be recovered from the archive.
        ObjectArchived = 0x0d, "ObjectArchived";
        /// An attribute has no such index.
        IndexOutOfBounds = 0x0e, "IndexOutOfBounds";
        /// The server does not know the application namespace.
        ApplicationNamespaceNotSupported = 0x0f, "ApplicationNamespaceNotSupported";
        /// The key cannot be given in this format.
        KeyFormatTypeNotSupported = 0x10, "KeyFormatTypeNotSupported";
        /// The key cannot be given with this compression.
        KeyCompressionTypeNotSupported = 0x11, "KeyCompressionTypeNotSupported";
        /// The encoding of a wrapped key is not supported.
        EncodingOptionError = 0x12, "EncodingOptionError";
        /// The server has the object without its key.
        KeyValueNotPresent = 0x13, "KeyValueNotPresent";
        /// The server requires an attestation.
        AttestationRequired = 0x14, "AttestationRequired";
        /// The attestation was wrong.
        AttestationFailed = 0x15, "AttestationFailed";
        /// The key may leave the server only wrapped (from 1.4).
        Sensitive = 0x16, "Sensitive";
        /// The key may not leave the server (from 1.4).
        NotExtractable = 0x17, "NotExtractable";
        /// The object exists already.
        ObjectAlreadyExists = 0x18, "ObjectAlreadyExists";
        /// Anything else.
        GeneralFailure = 0x100, "GeneralFailure";
    }
}

enumeration! {
    /// The state of a key, which decides its use (section 3.22).
    State {
        /// Created, not yet usable.
        PreActive = 1, "Pre-Active";
        /// In use.
        Active = 2, "Active";
        /// Only for decryption of existing data.
        Deactivated = 3, "Deactivated";
        /// Somebody else may have it; only for decryption of existing data.
        Compromised = 4, "Compromised";
        /// The key is gone.
        Destroyed = 5, "Destroyed";
        /// The key is gone, and somebody else may have it.
        DestroyedCompromised = 6, "Destroyed Compromised";
    }
}

enumeration! {
    /// Why a key is taken out of use (section 9.1.3.2.19).
    RevocationReason {
        /// No reason given: the key becomes Deactivated.
        Unspecified = 1, "Unspecified";
        /// Somebody else may have it: the key becomes Compromised.
        KeyCompromise = 2, "Key Compromise";
        /// Another key took its place: Deactivated.
        Superseded = 5, "Superseded";
        /// It is no longer needed: Deactivated.
        CessationOfOperation = 6, "Cessation of Operation";
    }
}

/// `Result Status` (section 9.1.3.2.28): done.
pub(crate) const STATUS_SUCCESS: u32 = 0;
/// Refused.
pub(crate) const STATUS_FAILED: u32 = 1;
/// Will be done later; the client must poll.
pub(crate) const STATUS_PENDING: u32 = 2;
/// Done, then undone because of another item of the batch.
pub(crate) const STATUS_UNDONE: u32 = 3;

/// `Object Type` (section 9.1.3.2.12): a symmetric key.
pub(crate) const OBJECT_SYMMETRIC_KEY: u32 = 2;
/// `Cryptographic Algorithm` (section 9.1.3.2.13): AES.
pub(crate) const ALGORITHM_AES: u32 = 3;
/// `Key Format Type` (section 9.1.3.2.3): the key's bytes.
pub(crate) const FORMAT_RAW: u32 = 1;
/// `Name Type` (section 9.1.3.2.11): text without meaning to the server.
pub(crate) const NAME_UNINTERPRETED_TEXT: u32 = 1;
/// `Batch Error Continuation Option` (section 9.1.3.2.30): do all items.
pub(crate) const BATCH_CONTINUE: u32 = 1;
/// `Cryptographic Usage Mask` (section 9.1.3.3.1): encrypt and decrypt.
pub(crate) const USAGE_ENCRYPT_DECRYPT: i32 = 0x04 | 0x08;
