//! DiscoverVersions (section 4.26) and Query (section 4.25): ask what a server is.

use super::{AnswerError, Operation};
use crate::fields::{Fields, Violation};
use crate::ttlv::{Encoder, Tag, Value};
use crate::{OperationCode, ProtocolVersion};

/// Asks which versions the server speaks; from KMIP 1.1 on.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiscoverVersions;

impl Operation for DiscoverVersions {
    const CODE: OperationCode = OperationCode::DiscoverVersions;
    const REPEATABLE: bool = true;
    /// In the server's order; empty if there is no common one.
    type Answer = Vec<ProtocolVersion>;

    /// Asks for all versions, so that the error for a server without a common one can name its versions.
    fn encode(&self, _: &mut Encoder) {}

    fn decode(&self, payload: Fields<'_, '_>) -> Result<Self::Answer, AnswerError> {
        let versions = payload.structures(Tag::PROTOCOL_VERSION);
        Ok(versions.map(|version| version?.version()).collect::<Result<_, Violation>>()?)
    }
}

/// `Query Function` (section 9.1.3.2.24): operations, and server information.
const QUERY_OPERATIONS: u32 = 1;
const QUERY_SERVER_INFORMATION: u32 = 3;

/// Asks a server for its description and operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query;

/// A server's description of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerDescription {
    /// The operations that it offers.
    pub operations: Vec<OperationCode>,
    /// Its vendor and product, as it names them.
    pub vendor: Option<String>,
}

impl Operation for Query {
    const CODE: OperationCode = OperationCode::Query;
    const REPEATABLE: bool = true;
    type Answer = ServerDescription;

    fn encode(&self, payload: &mut Encoder) {
        payload.enumeration(Tag::QUERY_FUNCTION, QUERY_OPERATIONS);
        payload.enumeration(Tag::QUERY_FUNCTION, QUERY_SERVER_INFORMATION);
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<Self::Answer, AnswerError> {
        let operation = |value: &Value<'_>| match value {
            Value::Enumeration(code) => Ok(OperationCode::from_number(*code)),
            _ => Err(Violation::WrongValue(Tag::OPERATION)),
        };
        let operations =
            payload.all(Tag::OPERATION).map(operation).collect::<Result<_, Violation>>()?;
        let vendor = payload.optional_text(Tag::VENDOR_IDENTIFICATION)?;
        let shown = |text: &str| text.chars().filter(|c| !c.is_control()).take(100).collect();
        Ok(ServerDescription { operations, vendor: vendor.map(shown) })
    }
}
